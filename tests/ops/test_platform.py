"""The platform that is compiled for, by which operations choose."""

import jax
import jax.numpy as jnp
import pytest

import zoo
from zoo.ops.platform import current_platform, target_platform


@pytest.mark.parametrize(("name", "platform"), [("cuda", "gpu"), ("rocm", "gpu"), ("gpu", "gpu"), ("tpu", "tpu")])
def test_platform_inside_is_that_of_the_context(name, platform):
    with target_platform(name):
        assert current_platform() == platform
    assert current_platform() == jax.default_backend() == "cpu"


def test_platform_is_part_of_the_trace_cache():
    seen = []
    trace = jax.jit(lambda x: seen.append(current_platform()) or x)
    trace(jnp.zeros(()))
    with target_platform("gpu"):
        jax.make_jaxpr(trace)(jnp.zeros(()))
    assert seen == ["cpu", "gpu"]


def test_platform_of_a_mesh_is_that_of_its_devices(monkeypatch):
    """JAX's default backend may be another one."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    seen = []
    mesh = zoo.make_mesh(data=1, devices=jax.devices("cpu")[:1])
    zoo.spmd(lambda x: seen.append(current_platform()) or x, mesh, out="batch seq")(jnp.zeros((2, 3)))
    assert mesh.platform == "cpu" and set(seen) == {"cpu"}
