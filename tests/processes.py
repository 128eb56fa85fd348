"""How tests compile, in their own process and in those that they start: fast, and into one cache where that is safe.

`conftest.py` imports this module before JAX, which reads the flags once.
"""

import importlib.metadata
import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("ZOO_TEST_CACHE") or ROOT / ".jax_cache")
CACHED_FROM = 0.2
"""Seconds: what compiles faster is not worth a file."""

# What is tested is what XLA makes of a program (its layout, its collectives), at sizes where the time goes into LLVM.
COMPILE_FAST = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
VERSION = importlib.metadata.version("jaxlib")
if VERSION.startswith(("0.10.", "0.12.")):  # jaxlib refuses to start with a flag that it does not know
    # Each part of a split module is set up and optimized alone, and the other core has the other worker: a fifth less.
    COMPILE_FAST += ["--xla_cpu_parallel_codegen_split_count=1"]
if VERSION.startswith("0.10."):
    COMPILE_FAST += ["--xla_cpu_use_fusion_emitters=false"]  # a quarter less of a test's time


def make_xla_flags(devices: int, *more: str) -> str:
    """Return the value of `XLA_FLAGS` for so many emulated devices."""
    return " ".join([f"--xla_force_host_platform_device_count={devices}", *COMPILE_FAST, *more])


def make_environment(devices: int = 1, *flags: str, **variables: str) -> dict[str, str]:
    """Return the environment of a process that a test starts; `flags` are XLA's, and `variables` come on top.

    Processes with one device share a compilation cache. XLA:CPU misorders collectives of cached programs
    (`zoo._compile_cache`), so processes with several devices have none.
    """
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": make_xla_flags(devices, *flags),
        "JAX_ENABLE_COMPILATION_CACHE": str(devices == 1).lower(),
        "JAX_COMPILATION_CACHE_DIR": str(CACHE),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(CACHED_FROM),
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(ROOT),
        **variables,
    }
