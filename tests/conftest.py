"""Eight virtual CPU devices, a compilation cache that outlives the run, and calm property tests."""

import os
from pathlib import Path

DEVICES = "--xla_force_host_platform_device_count=8"
# What is tested is what XLA makes of a program (its layout, its collectives), at sizes where the time goes into LLVM.
COMPILE_FAST = "--xla_backend_optimization_level=0"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES} {COMPILE_FAST}".strip()

import hypothesis  # noqa: E402
import jax  # noqa: E402

CACHE = Path(os.environ.get("ZOO_TEST_CACHE") or Path(__file__).parents[1] / ".jax_cache")

jax.config.update("jax_compilation_cache_dir", str(CACHE))
# jaxlib 0.10.2 crashed twice while it wrote a program into a new cache, late in a whole run (a segmentation fault in
# `serialize`, in tests/models/test_transformer.py). Continuous integration starts without a cache and keeps none: there
# nothing is written.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 3600 if os.environ.get("CI") else 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Each new shape compiles for seconds: few examples, no deadline, and the same ones every time.
hypothesis.settings.register_profile(
    "zoo",
    derandomize=True,
    deadline=None,
    max_examples=15,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("zoo")
