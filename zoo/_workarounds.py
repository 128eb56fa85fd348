"""Workarounds for bugs of jaxlib on CPUs that give wrong results, or none."""

import importlib.metadata
import os
import warnings

AFFECTED_VERSIONS = ("0.10.2",)
XLA_FLAGS = {
    # YNNPACK sums wrongly in reductions that it fuses with their producers, such as a norm between matrix products of
    # enough rows: jax issues 39103, 39257 and 40412.
    "xla_cpu_experimental_ynn_fusion_type": "-LIBRARY_FUSION_TYPE_REDUCE",
    # All permutes of a program have one channel. Where this scheduler reorders them, a device can meet the others in
    # the wrong one: the program waits for ever, or stops with "Unexpected number of participants".
    "xla_cpu_enable_concurrency_optimized_scheduler": "false",
}


def set_cpu_flags() -> None:
    """Add to `XLA_FLAGS` what jaxlib 0.10.2 needs on CPUs for right sums and for collectives that end.

    Flags that you have set stay as they are; other versions are left alone.

    **Warns** if JAX has already run a computation, because it reads `XLA_FLAGS` once, before the first.
    """
    given = os.environ.get("XLA_FLAGS", "")
    flags = " ".join(f"--{name}={value}" for name, value in XLA_FLAGS.items() if name not in given)
    if importlib.metadata.version("jaxlib") not in AFFECTED_VERSIONS or not flags:
        return
    from jax._src import xla_bridge  # no public function tells without starting a backend

    if xla_bridge.backends_are_initialized():
        warnings.warn(
            f"on a CPU jaxlib {AFFECTED_VERSIONS[0]} can give wrong sums and collectives that never end, and JAX had "
            f'started before zoo could prevent it: import zoo before the first computation, or set XLA_FLAGS="{flags}"',
            stacklevel=2,
        )
        return
    os.environ["XLA_FLAGS"] = f"{given} {flags}".strip()
