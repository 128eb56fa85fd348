"""Moved to `zoo.parallel.initialize`."""

raise ImportError("zoo.distributed has moved to zoo.parallel.initialize; after it, call jax.process_index()")
