"""Eight virtual CPU devices, and calm property tests."""

import gc
import itertools
import os
from pathlib import Path

from tests.processes import make_xla_flags

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # wrong on several CPU devices; see zoo/_compile_cache.py
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {make_xla_flags(8)}".strip()

import hypothesis
import jax
import jaxtyping
import pytest
from jax._src.interpreters import mlir

from tests import quick_checks

# Where in the source each operation was traced is asked by no test; and what tracing allocates is seldom garbage.
jax.config.update("jax_traceback_in_locations_limit", 0)
gc.set_threshold(50_000, 10, 10)


def share_contexts(make, uses=100):
    """Return a `make_ir_context` whose contexts serve several programs, as each takes longer than a small program.

    What a program was made of stays in its context, so that a new one follows before that is much.
    """
    made, count = None, 0

    def share():
        nonlocal made, count
        if count % uses == 0:
            made = make()
        count += 1
        return made

    return share


if hasattr(mlir, "make_ir_context"):
    mlir.make_ir_context = share_contexts(mlir.make_ir_context)
quick_checks.install()

MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 40_000
TESTS = itertools.count()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Let go of compiled programs while there is room for more. Each takes some mappings of memory; Linux allows a
    process 65,530 of them (vm.max_map_count), a whole run made more, and jaxlib then ended in a segmentation fault.
    To list them takes 10 ms, so that only some tests ask."""
    if next(TESTS) % 20 == 0 and MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture
def no_type_checks(monkeypatch):
    """Switch off the checks of annotations, which users do not run: what is raised is the library's own error."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


# Each new shape compiles for seconds: few examples, no deadline, and the same ones every time.
hypothesis.settings.register_profile(
    "zoo",
    derandomize=True,
    deadline=None,
    max_examples=10,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("zoo")
