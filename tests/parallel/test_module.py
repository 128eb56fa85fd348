"""Modules check arrays against annotations, and `leaves` reads dims and metadata from them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jaxtyping import Array, Float, Int

import zoo
from zoo.parallel import Dim, Module, buffer, full_precision, leaves, stacked


class Pair(Module):
    weight: Float[Array, "out in"]
    bias: Float[Array, "out"] | None
    scales: tuple[Float[Array, "out"], ...] = ()
    seen: Int[Array, ""] | None = buffer(default=None)

    out: Dim = eqx.field(static=True, default=Dim("heads", 4))


class Tower(Module):
    pairs: Pair = stacked("layers")
    norm: Float[Array, "embed"] = full_precision()


def pair(out=8, in_=3, **fields):
    return Pair(jnp.ones((out, in_)), jnp.ones(out), **fields)


def test_dims_come_from_the_annotation_and_the_instance():
    dims = {leaf.name: leaf.dims for leaf in leaves(pair(scales=(jnp.ones(8),), seen=jnp.array(3)))}
    heads = Dim("heads", 4)
    assert dims == {"weight": (heads, Dim("in")), "bias": (heads,), "scales.0": (heads,), "seen": ()}


def test_leaves_of_stacked_modules_and_optimizer_states():
    tower = Tower(eqx.filter_vmap(lambda x: Pair(x * jnp.ones((8, 3)), None))(jnp.arange(2.0)), jnp.ones(5))
    assert [leaf.dims for leaf in leaves(tower)] == [(Dim("layers"), Dim("heads", 4), Dim("in")), (Dim("embed"),)]
    state = leaves(optax.adam(1e-3).init(zoo.trainable(tower)))
    assert [(leaf.name, leaf.dims) for leaf in state if "mu" in leaf.name] == [
        ("0.mu.pairs.weight", (Dim("layers"), Dim("heads", 4), Dim("in"))),
        ("0.mu.norm", (Dim("embed"),)),
    ]
    assert [leaf.dims for leaf in state if "count" in leaf.name] == [None]


def test_trainable_omits_buffers_and_cast_keeps_full_precision():
    tower = Tower(eqx.filter_vmap(lambda x: pair(seen=x))(jnp.arange(2)), jnp.ones(5))
    assert zoo.trainable(tower).pairs.seen is None
    assert zoo.count(tower) == 2 * (8 * 3 + 8) + 5
    cast = zoo.cast(tower, jnp.bfloat16)
    assert (cast.pairs.weight.dtype, cast.norm.dtype, cast.pairs.seen.dtype) == (jnp.bfloat16, jnp.float32, jnp.int32)


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: Pair(jnp.ones((8, 3)), jnp.ones(7)),
            r"Pair.bias is float32\[7\].*Float\[Array, .out.\].*weight \[8, 3\], bias \[7\]",
        ),
        (lambda: Pair(jnp.ones((8, 3), int), None), r"Pair.weight is int32\[8, 3\]"),
        (lambda: Pair(jnp.ones((8, 3, 2)), None), r"Pair.weight holds an array of 3 dims"),
        (lambda: pair(out=6), r"Pair.weight: 6 elements are not a whole number of heads, 4 elements each"),
    ],
)
def test_module_raises_on_an_array_of_another_shape_or_dtype(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_module_raises_on_an_annotation_without_dims():
    class Loose(Module):
        weight: Array

    class Variadic(Module):
        weight: Float[Array, "*any"]

    class Future(Module):
        weight: "Float[Array, 'out']"

    for kind, message in (
        (Loose, "Loose.weight holds an array of 1 dims.*one fixed name per dim"),
        (Variadic, "Variadic.weight holds an array of 1 dims"),
        (Future, "Future.weight is annotated with the string.*from __future__"),
    ):
        with pytest.raises(TypeError, match=message):
            kind(jnp.ones(3))


def test_module_check_works_under_vmap_and_eval_shape():
    assert eqx.filter_vmap(lambda x: Pair(x * jnp.ones((8, 3)), None))(jnp.arange(2.0)).weight.shape == (2, 8, 3)
    assert eqx.filter_eval_shape(pair).weight == jax.ShapeDtypeStruct((8, 3), jnp.float32)
    with pytest.raises(TypeError, match=r"Pair.bias"):
        eqx.filter_eval_shape(lambda: Pair(jnp.ones((8, 3)), jnp.ones(7)))
