"""Faults of jaxlib that give wrong numbers, and how they are kept away."""

import importlib.metadata
import os
import warnings

XLA_FLAG = "xla_cpu_experimental_ynn_fusion_type"
AFFECTED_VERSIONS = ("0.10.2",)


def disable_cpu_reduce_fusion() -> None:
    """On CPUs jaxlib 0.10.2 hands sums, and what leads to them, to a library that at times gives wrong numbers for them
    (jax issues 39103, 39257 and 40412): a norm between products of enough rows, for one. This adds to `XLA_FLAGS` what
    takes sums out of its hands. A flag of yours that speaks of it stays as it is, and other versions are left alone.

    JAX reads `XLA_FLAGS` once, before its first computation: **warns** where that has been.
    """
    if importlib.metadata.version("jaxlib") not in AFFECTED_VERSIONS or XLA_FLAG in os.environ.get("XLA_FLAGS", ""):
        return
    from jax._src import xla_bridge  # nothing public tells it without starting a backend

    flag = f"--{XLA_FLAG}=-LIBRARY_FUSION_TYPE_REDUCE"
    if xla_bridge.backends_are_initialized():
        warnings.warn(
            f"jaxlib {AFFECTED_VERSIONS[0]} can give wrong sums on a CPU, and JAX had started before zoo could tell it not to: "
            f"import zoo before the first computation, or set XLA_FLAGS={flag}",
            stacklevel=2,
        )
        return
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
