"""Workarounds for bugs in jaxlib that give wrong results."""

import importlib.metadata
import os
import warnings

XLA_FLAG = "xla_cpu_experimental_ynn_fusion_type"
AFFECTED_VERSIONS = ("0.10.2",)


def disable_cpu_reduce_fusion() -> None:
    """Disable YNNPACK fusion of reductions on CPUs, which gives wrong sums in jaxlib 0.10.2.

    Affected are reductions fused with their producers (jax issues 39103, 39257 and 40412), such as a norm between
    matrix products of enough rows. Adds a flag to `XLA_FLAGS`, unless you have set it; other versions are left alone.

    **Warns** if JAX has already run a computation, because it reads `XLA_FLAGS` once, before the first.
    """
    if importlib.metadata.version("jaxlib") not in AFFECTED_VERSIONS or XLA_FLAG in os.environ.get("XLA_FLAGS", ""):
        return
    from jax._src import xla_bridge  # no public function tells without starting a backend

    flag = f"--{XLA_FLAG}=-LIBRARY_FUSION_TYPE_REDUCE"
    if xla_bridge.backends_are_initialized():
        warnings.warn(
            f"jaxlib {AFFECTED_VERSIONS[0]} can give wrong sums on a CPU, and JAX had started before zoo could "
            f"prevent it: import zoo before the first computation, or set XLA_FLAGS={flag}",
            stacklevel=2,
        )
        return
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
