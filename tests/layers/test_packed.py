"""A packed matrix multiplies as the one that it stands for, alone and as an expert, on one device and on a mesh."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import ClampedGatedMLP, Linear, MixtureOfExperts, MXFP4Linear, SoftmaxRouter
from zoo.ops.quantized.mxfp4 import dequantize_mxfp4
from zoo.parallel import Dim

KEY = jax.random.key(0)
EMBED, WIDTH, EXPERTS = 64, 128, 4


def unpacked(tree):
    """With a `Linear` in place of every packed one, of the same numbers."""

    def plain(x):
        if not isinstance(x, MXFP4Linear):
            return x
        linear = object.__new__(Linear)
        found = {"weight": dequantize_mxfp4(x.blocks, x.scales), "bias": x.bias, "in_": x.in_, "out": x.out}
        for name, value in found.items():
            object.__setattr__(linear, name, value)
        return linear

    return jax.tree.map(plain, tree, is_leaf=lambda x: isinstance(x, MXFP4Linear))


def mixture(**options):
    expert = partial(ClampedGatedMLP, EMBED, WIDTH, limit=0.7, linear=MXFP4Linear)
    made = MixtureOfExperts(partial(SoftmaxRouter, EMBED, EXPERTS, 2), expert, EXPERTS, key=KEY, **options)
    moved = lambda x: x + 0.1 * jax.random.normal(KEY, x.shape) if x.dtype == jnp.float32 else x  # biases start at 0
    return jax.tree.map(moved, made)


def test_alone():
    packed = MXFP4Linear(64, 5, bias=True, key=KEY)
    packed = eqx.tree_at(lambda x: x.bias, packed, jnp.arange(5.0))
    plain = unpacked(packed)
    x, y = jax.random.normal(KEY, (2, 3, 64)), jax.random.normal(KEY, (2, 3, 5))
    assert packed.out_size == 5 and packed.blocks.shape == (5, 2, 16) and packed.scales.shape == (5, 2)
    assert jnp.allclose(packed(x), plain(x), atol=1e-5)
    assert jnp.allclose(packed.transposed(y), plain.transposed(y), atol=1e-5)
    assert packed(x.astype(jnp.bfloat16)).shape == (2, 3, 5)


def test_new_weights_are_those_of_a_linear_rounded():
    packed, linear = (kind(64, 40, scale=0.3, key=KEY) for kind in (MXFP4Linear, Linear))
    off = jnp.abs(dequantize_mxfp4(packed.blocks, packed.scales) - linear.weight).reshape(40, 2, 32)
    assert (off <= jnp.abs(linear.weight).reshape(40, 2, 32).max(-1, keepdims=True) / 4).all() and off.max() > 0


@pytest.mark.parametrize(
    ("in_size", "in_", "says"),
    [
        (48, Dim("in"), "of 32, and 48 are no whole blocks: take a Linear"),
        (96, Dim("heads", 48), "96, 48 to each"),
    ],
)
def test_blocks_are_whole(in_size, in_, says):
    with pytest.raises(ValueError, match=says):
        MXFP4Linear(in_size, 8, in_=in_, key=KEY)


def test_only_its_bias_is_learnt_and_cast():
    packed = MXFP4Linear(64, 5, bias=True, key=KEY)
    assert [x.shape for x in jax.tree.leaves(zoo.trainable(packed))] == [(5,)] and zoo.count(packed) == 5
    half = zoo.cast(packed, jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype("uint8"), jnp.dtype("bfloat16")}


def loss_fn(layers, x):
    before, mixture = zoo.parallel.gather(layers)
    return (mixture(before(x))[0] ** 2).sum(), jnp.float32(len(x))


def results(layers, mesh):
    """The loss, and the gradients of what is learnt, by name."""
    x = jax.random.normal(KEY, (8, 9, EMBED))
    loss, grads = zoo.value_and_grad(loss_fn, mesh)(zoo.place(layers, mesh), x)
    names = [leaf.name for leaf in zoo.parallel.leaves(grads)]
    return {"loss": float(loss), **dict(zip(names, jax.device_get(jax.tree.leaves(grads)), strict=True))}


@pytest.mark.parametrize(
    ("sizes", "options"),
    [({}, {}), ({}, {"capacity_factor": 1.0}), ({"data": 2, "fsdp": 2, "tensor": 2}, {})],
    ids=["one device", "up to a capacity", "on a mesh"],
)
def test_as_experts(sizes, options):
    """The same as with the matrices decoded, and so are the gradients of all that is learnt, before and after them."""
    one = zoo.make_mesh(devices=jax.devices()[:1])
    layers = Linear(EMBED, EMBED, in_=Dim("in"), out=Dim("embed"), key=KEY), mixture(**options)
    expected = results(unpacked(layers), one)
    found = results(layers, zoo.make_mesh(**sizes) if sizes else one)
    assert {name.partition(".")[2] for name in expected.keys() - found.keys()} == {
        f"experts.{part}.weight" for part in ("gate", "up", "down")
    }
    for name, ours in found.items():
        theirs = expected[name]
        assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max(), name


def test_blocks_that_do_not_share_out_are_told():
    packed = MXFP4Linear(96, 8, in_=Dim("mlp"), key=KEY)
    with pytest.raises(ValueError, match="blocks: 3 mlp do not share out over tensor=2"):
        zoo.place(packed, zoo.make_mesh(data=4, tensor=2))
