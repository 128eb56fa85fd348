"""Reasons not to use cuDNN: all that JAX would refuse, on the GPU that is there."""

import dataclasses

import jax.numpy as jnp
import pytest

from zoo.ops.attention import ATTENTION
from zoo.ops.attention.fused import cudnn, find_cudnn_obstacle
from zoo.ops.attention.request import AttentionRequest
from zoo.ops.platform import target_platform

REQUEST = AttentionRequest(
    batch=2, query_seq=64, key_seq=64, heads=4, kv_heads=2, head_dim=64, value_dim=64, dtype=jnp.bfloat16, causal=True
)


@pytest.fixture
def hopper(monkeypatch):
    """A GPU of compute capability 9.0 with cuDNN."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    with target_platform("gpu"):
        yield


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": jnp.dtype("float32")}, "not float32"),
        ({"has_one_dtype": False}, "several dtypes"),
        ({"soft_cap": 3.0}, "soft cap"),
        ({"has_sinks": True}, "sinks"),
        ({"has_decays": True}, "decays"),
        ({"block": 4, "query_seq": 63}, "this one is 63 x 64"),
        ({"value_dim": 32}, "values are 32 wide"),
        ({"head_dim": 60, "value_dim": 60}, "heads have 60 features"),
        ({"head_dim": 264, "value_dim": 264}, "a multiple of 8 up to 256"),
        ({"causal": False, "window": 3}, "two sides"),
        ({"has_positions": True, "query_seq": 1}, "this one is 1 x 64"),
    ],
)
def test_cudnn_obstacles_are_those_of_jax(hopper, changes, reason):
    request = dataclasses.replace(REQUEST, **changes)
    assert reason in str(find_cudnn_obstacle(request))
    assert ATTENTION.select("auto", request).name != "cudnn"


def test_cudnn_is_chosen_where_it_can_compute(hopper, monkeypatch):
    assert ATTENTION.select("auto", REQUEST).name == "cudnn"
    assert find_cudnn_obstacle(dataclasses.replace(REQUEST, has_segments=True, window=3)) is None
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: False)
    assert "up to 128" in str(find_cudnn_obstacle(dataclasses.replace(REQUEST, head_dim=192, value_dim=192)))


def test_cudnn_is_not_chosen_without_its_library():
    with target_platform("gpu"):
        assert find_cudnn_obstacle(REQUEST) == "JAX finds no cuDNN here"
        with pytest.raises(ValueError, match="'cudnn' cannot compute this, because JAX finds no cuDNN here"):
            ATTENTION.select("cudnn", REQUEST)
