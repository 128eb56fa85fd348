"""Softmax attention: its base class, one file per variant, and the forms for caches and sharded sequences."""
