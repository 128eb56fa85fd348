"""`import zoo` corrects sums that jaxlib 0.10.2 computes wrongly on CPUs."""

import importlib.metadata
import os
import subprocess
import sys

import jax
import pytest

from zoo._workarounds import AFFECTED_VERSIONS, XLA_FLAG, disable_cpu_reduce_fusion

SUMS = """
import zoo, jax, jax.numpy as jnp
x = jnp.stack([jnp.arange(32769.0), jnp.zeros(32769), jnp.zeros(32769)], axis=1)
sums = jax.jit(lambda x: jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2))(x))(x)
assert sums[-1] == 32768.0**2, sums[-1]
"""
affected = pytest.mark.skipif(
    importlib.metadata.version("jaxlib") not in AFFECTED_VERSIONS, reason="this jaxlib has no such bug"
)


def test_import_corrects_the_sum_of_many_rows():
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    process = subprocess.run([sys.executable, "-c", SUMS], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


@affected
def test_workaround_extends_xla_flags_unless_set(monkeypatch):
    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    with pytest.warns(UserWarning, match="import zoo before the first computation, or set XLA_FLAGS=--xla"):
        disable_cpu_reduce_fusion()
    monkeypatch.setenv("XLA_FLAGS", f"--{XLA_FLAG}=")
    disable_cpu_reduce_fusion()
    assert os.environ["XLA_FLAGS"] == f"--{XLA_FLAG}="
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    disable_cpu_reduce_fusion()
    assert os.environ["XLA_FLAGS"] == f"--mine --{XLA_FLAG}=-LIBRARY_FUSION_TYPE_REDUCE"
