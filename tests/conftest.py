"""Eight virtual CPU devices, and calm property tests."""

import gc
import importlib.util
import os
from pathlib import Path

from tests.processes import make_xla_flags

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the network: tests/weights/hub.py has a hub of its own
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # wrong on several CPU devices; see zoo/_compile_cache.py
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {make_xla_flags(8)}".strip()

import hypothesis
import jax
import jaxtyping
import pytest

# Where in the source each operation was traced is asked by no test; and what tracing allocates is seldom garbage.
jax.config.update("jax_traceback_in_locations_limit", 0)
gc.set_threshold(50_000, 10, 10)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items):
    """Mark the cases of a test with `one_case` as ci, or as its argument says, but for the first that is not slow."""
    seen = set()
    for item in items:
        mark = item.get_closest_marker("one_case")
        if mark and not item.get_closest_marker("slow"):
            name = item.nodeid.partition("[")[0]
            if name in seen:
                item.add_marker(getattr(pytest.mark, *mark.args or ("ci",)))
            seen.add(name)


def pytest_runtest_setup(item):
    """Skip the tests of neighbors that are not installed."""
    for mark in item.iter_markers("neighbors"):
        for name in mark.args:
            if importlib.util.find_spec(name) is None:
                pytest.skip(f"{name} is not installed")


def pytest_sessionfinish(session):
    """Fail if `make neighbors` left a test out, except for want of stored cases."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if "ZOO_NEIGHBORS" in os.environ and reporter:
        skipped = [report for report in reporter.stats.get("skipped", ()) if "ZOO_PARITY" not in str(report.longrepr)]
        if skipped and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 6000
"""Mappings of memory up to which programs are kept: about 2,000 programs, and 2 GB."""


@pytest.fixture(scope="module", autouse=True)
def release_programs():
    """Let go of compiled programs after a file, if there are many: files share most of the small ones.

    Each program takes two or three mappings of memory. Linux allows a process 65,530 of them (vm.max_map_count).
    """
    yield
    if not MAPPINGS.exists() or MAPPINGS.read_text().count("\n") > MOST_MAPPINGS:
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
