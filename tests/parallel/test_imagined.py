"""Devices of topologies that are not here: their number and order, what is refused, and the environment left alone."""

import importlib.util
import os
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import zoo
from tests.aot import imagine
from zoo._optional import MissingExtraError
from zoo.parallel.imagined import _environment


@pytest.mark.parametrize("topology", ["v5e", "v5e:8", "v5e:2x2x2", "v4:2x2x1", "h100:2x2x2", "h100:8*2", "t4:8", ""])
def test_unknown_topologies_are_refused(topology):
    with pytest.raises(ValueError, match=r"is not a known topology. Known are v5e:2x4, .* h100:8 "):
        zoo.parallel.imagined(topology)


@pytest.mark.parametrize(
    ("topology", "extra"),
    [("v5e:2x4", "aot-tpu"), ("v5p:2x2x2*2", "aot-tpu"), ("h100:8", "aot-cuda"), ("b200:8", "aot-cuda")],
)
def test_missing_compilers_are_named_with_their_extra(topology, extra, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the error sets it: put it back
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'equizoo\[{extra}\]'"):
        zoo.parallel.imagined(topology)


def test_environment_is_put_back(monkeypatch):
    monkeypatch.setenv("ZOO_TEST_SET", "mine")
    monkeypatch.delenv("ZOO_TEST_UNSET", raising=False)
    with pytest.raises(KeyError), _environment({"ZOO_TEST_SET": "theirs", "ZOO_TEST_UNSET": "1"}):
        assert (os.environ["ZOO_TEST_SET"], os.environ["ZOO_TEST_UNSET"]) == ("mine", "1")
        raise KeyError
    assert os.environ["ZOO_TEST_SET"] == "mine" and "ZOO_TEST_UNSET" not in os.environ


def test_imagined_devices_take_shapes_and_no_arrays(monkeypatch):
    monkeypatch.setattr(sys.modules["zoo.parallel.place"], "is_imagined", lambda device: True)
    mesh = zoo.make_mesh(data=-1)
    make = lambda key: zoo.layers.Linear(4, 8, key=key)
    shapes = eqx.filter_eval_shape(make, jax.random.key(0))
    assert zoo.place(shapes, mesh).weight.sharding.mesh == mesh.devices
    assert zoo.place_batch(jax.ShapeDtypeStruct((8, 2), "int32"), mesh).sharding.spec == jax.P("data")
    for place in (
        lambda: zoo.init(make, jax.random.key(0), mesh),
        lambda: zoo.place(make(jax.random.key(0)), mesh),
        lambda: zoo.place_batch(jnp.zeros((8, 2)), mesh),
    ):
        with pytest.raises(ValueError, match=r"devices of this mesh are imagined and hold no arrays: make shapes by"):
            place()


@pytest.mark.aot
@pytest.mark.parametrize(
    ("topology", "count", "platform"),
    [("v5e:2x4", 8, "tpu"), ("v6e:2x2", 4, "tpu"), ("v5p:4x4x4", 64, "tpu"), ("tpu7x:2x2x1", 8, "tpu"),
     ("h100:8", 8, "gpu"), ("h100:8x8", 64, "gpu")],
)  # fmt: skip
def test_topologies_have_their_devices(topology, count, platform):
    mesh = zoo.make_mesh(data=-1, tensor=2, devices=imagine(topology))
    assert (mesh.devices.size, mesh.platform) == (count, platform)


@pytest.mark.aot
def test_the_outermost_axis_spans_slices():
    mesh = zoo.make_mesh(data=2, fsdp=4, tensor=2, devices=imagine("v5p:2x2x2*2"))
    first, second = mesh.devices.devices.reshape(2, 8)
    assert {device.slice_index for device in first} == {0} and {device.slice_index for device in second} == {1}


@pytest.mark.aot
def test_sizes_that_no_host_has_are_refused():
    imagine("v5e:2x4")
    with pytest.raises(ValueError, match=r"libtpu has no topology 'v5e:3x3': INVALID_ARGUMENT: .* not divisible"):
        zoo.parallel.imagined("v5e:3x3")
