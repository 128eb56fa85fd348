"""The picture of a layer agrees with the library: JAX's shards, traced all-reduces and all-gathers."""

import math
import xml.etree.ElementTree as ElementTree

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec

import zoo
from scripts import draw_layer
from scripts.picture import FFN, MIXER, Picture
from zoo.layers import TokenInfo
from zoo.models import Hidden
from zoo.parallel import gather

SIZES = {"embed": 64, "heads": 8, "kv_heads": 4, "mlp": 128}
MESHES = {
    "fsdp 2, tensor 4": {"fsdp": 2, "tensor": 4},
    "all three": {"data": 2, "fsdp": 2, "tensor": 2},
    "kv_heads replicated": {"data": 1, "tensor": 8},
    "data alone": {"data": 8},
}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(params=MESHES.values(), ids=MESHES)
def mesh(request):
    return zoo.make_mesh(**request.param)


def test_shard_indices_match_jax(mesh):
    numbers = {device: number for number, device in enumerate(mesh.devices.devices.flat)}
    arrays = draw_layer.list_layer_arrays(mesh, **SIZES)
    assert len(arrays) == 9
    for array in arrays.values():
        sharding = NamedSharding(mesh.devices, PartitionSpec(*(axes or None for axes in array.sharded_axes)))
        for device, index in sharding.devices_indices_map(array.shape).items():
            sizes = [size // array.num_shards(dim) for dim, size in enumerate(array.shape)]
            starts = [(cut.start or 0) // size for cut, size in zip(index, sizes, strict=True)]
            assert array.shard_index(numbers[device]) == tuple(starts)
        assert array.num_stored == math.prod(sharding.shard_shape(array.shape))


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_picture_has_the_collectives_of_the_layer(mesh):
    def block(key):
        return next(zoo.models.Transformer(vocab=1, layers=1, **SIZES, key=key).stack.iter_blocks())

    def run(block, x):
        return gather(block)(Hidden(x), TokenInfo())[0].x

    arrays, static = eqx.partition(eqx.filter_eval_shape(block, jax.random.key(0)), is_shape)
    x = jax.ShapeDtypeStruct((8, 4, 64), jnp.float32)
    traced = jax.make_jaxpr(
        lambda arrays, x: zoo.spmd(run, mesh, out="batch seq embed")(eqx.combine(arrays, static), x)
    )(arrays, x)
    names = [str(equation.primitive) for equation in equations(traced.jaxpr)]
    layer_arrays = draw_layer.list_layer_arrays(mesh, **SIZES)
    picture = Picture(str(mesh), layer_arrays, 0, False)
    assert sum(name.startswith("psum") for name in names) == sum(
        bool(picture.summed_axes(half)) for half in (MIXER, FFN)
    )
    assert sum(name.startswith("all_gather") for name in names) == sum(
        any(a.gathered_axes) for a in layer_arrays.values()
    )


def is_shape(x):
    return isinstance(x, jax.ShapeDtypeStruct)


@pytest.mark.parametrize("narrow", [False, True])
def test_picture_is_complete(mesh, narrow):
    last = mesh.devices.size - 1
    svg = draw_layer.draw(mesh, **SIZES, device=last, narrow=narrow)
    assert svg == draw_layer.draw(mesh, **SIZES, device=last, narrow=narrow)
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    ids = {element.get("id"): "".join(element.itertext()) for element in root if element.get("id")}
    title, text = (ids[name] for name in root.get("aria-labelledby", "").split())
    assert str(mesh) in title and f"Device {last} stores" in text
    words = {element.text for element in root.iter(f"{SVG}text")}
    assert words >= {"query", "key", "value", "out", "gate", "up", "down", "heads", "kv_heads", "mlp", "embed"}
    assert ("all-reduce" in words) == (mesh.shape["tensor"] > 1)
    # One shard of every array is the device's own, one square of the mesh, and one of the legend.
    own = [element for element in root.iter(f"{SVG}rect") if element.get("class") == "own"]
    assert len(own) == 9 + 2
    width, height = map(float, root.get("viewBox", "").split()[2:])
    for element in root.iter(f"{SVG}rect"):
        assert 0 <= float(element.get("x", "")) <= width and 0 <= float(element.get("y", "")) <= height
    assert not any(word in svg for word in ("<script", "href", "url(", "@import", "@font-face"))


def test_draw_refuses_impossible_meshes():
    mesh = zoo.make_mesh(fsdp=2, tensor=4)
    with pytest.raises(ValueError, match="has devices 0 to 7"):
        draw_layer.draw(mesh, **SIZES, device=8)
    with pytest.raises(ValueError, match="6 heads do not divide evenly over tensor=4"):
        draw_layer.draw(mesh, **{**SIZES, "embed": 96, "heads": 6, "kv_heads": 6}, device=0)
    many = draw_layer.make_abstract_mesh(data=1, fsdp=32, tensor=4)
    with pytest.raises(ValueError, match="a picture shows up to 64"):
        draw_layer.draw(many, **SIZES, device=0)


def test_main_prints_a_picture(capsys):
    draw_layer.main(data=2, fsdp=2, tensor=4, device=13)
    assert "One layer on data 2 x fsdp 2 x tensor 4" in capsys.readouterr().out
    for options, error in ({"tensor": 3}, "do not divide evenly over tensor=3"), ({}, "One device holds everything"):
        with pytest.raises(SystemExit, match=error):
            draw_layer.main(**options)
