"""MXFP4 linear layers equal a `Linear` with the dequantized weight: alone, as experts, and on a mesh."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import Linear, MixtureOfExperts, SoftmaxRouter
from zoo.layers.quantized.linear import MXFP4Linear
from zoo.models.hf.families.gpt_oss_layers import ClampedGatedMLP
from zoo.ops.quantized.mxfp4 import dequantize_mxfp4
from zoo.parallel import Dim

KEY = jax.random.key(0)
EMBED, MLP_DIM, EXPERTS = 64, 128, 4


def dequantize(tree):
    """Replace every `MXFP4Linear` by a `Linear` with the dequantized weight."""

    def to_linear(x):
        if not isinstance(x, MXFP4Linear):
            return x
        linear = object.__new__(Linear)
        fields = {"weight": dequantize_mxfp4(x.blocks, x.scales), "bias": x.bias, "in_": x.in_, "out": x.out}
        for name, value in fields.items():
            object.__setattr__(linear, name, value)
        return linear

    return jax.tree.map(to_linear, tree, is_leaf=lambda x: isinstance(x, MXFP4Linear))


def make_mixture(**options):
    expert = partial(ClampedGatedMLP, EMBED, MLP_DIM, limit=0.7, linear=MXFP4Linear)
    layer = MixtureOfExperts(partial(SoftmaxRouter, EMBED, EXPERTS, 2), expert, EXPERTS, key=KEY, **options)
    add_noise = lambda x: (
        x + 0.1 * jax.random.normal(KEY, x.shape) if x.dtype == jnp.float32 else x
    )  # biases too, which are initialized to 0
    return jax.tree.map(add_noise, layer)


def test_mxfp4_linear_equals_dequantized():
    packed = MXFP4Linear(64, 5, bias=True, key=KEY)
    packed = eqx.tree_at(lambda x: x.bias, packed, jnp.arange(5.0))
    linear = dequantize(packed)
    x, y = jax.random.normal(KEY, (2, 3, 64)), jax.random.normal(KEY, (2, 3, 5))
    assert packed.out_size == 5 and packed.blocks.shape == (5, 2, 16) and packed.scales.shape == (5, 2)
    assert jnp.allclose(packed(x), linear(x), atol=1e-5)
    assert jnp.allclose(packed.transposed(y), linear.transposed(y), atol=1e-5)
    assert packed(x.astype(jnp.bfloat16)).shape == (2, 3, 5)


def test_mxfp4_initialization_is_that_of_linear_quantized():
    make = lambda: tuple(kind(64, 40, scale=0.3, key=KEY) for kind in (MXFP4Linear, Linear))
    packed, linear = eqx.filter_jit(make)()
    weight = np.asarray(linear.weight).reshape(40, 2, 32)
    error = np.abs(np.asarray(dequantize_mxfp4(packed.blocks, packed.scales)).reshape(weight.shape) - weight)
    assert (error <= np.abs(weight).max(-1, keepdims=True) / 4).all() and error.max() > 0


@pytest.mark.parametrize(
    ("in_size", "in_", "message"),
    [
        (48, Dim("in"), "of 32, and 48 are not whole blocks: take a Linear"),
        (96, Dim("heads", 48), "96, 48 to each"),
    ],
)
def test_mxfp4_linear_rejects_partial_blocks(in_size, in_, message):
    with pytest.raises(ValueError, match=message):
        MXFP4Linear(in_size, 8, in_=in_, key=KEY)


def test_mxfp4_linear_trains_and_casts_only_its_bias():
    packed = MXFP4Linear(64, 5, bias=True, key=KEY)
    assert [x.shape for x in jax.tree.leaves(zoo.trainable(packed))] == [(5,)] and zoo.count(packed) == 5
    half = zoo.cast(packed, jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype("uint8"), jnp.dtype("bfloat16")}


def loss_fn(layers, x):
    linear, mixture = zoo.parallel.gather(layers)
    return (mixture(linear(x))[0] ** 2).sum(), jnp.float32(len(x))


def compute_loss_and_grads(layers, mesh):
    """Return the loss and the gradients of trainable parameters, by name."""
    x = jax.random.normal(KEY, (8, 9, EMBED))
    loss, grads = zoo.value_and_grad(loss_fn, mesh)(zoo.place(layers, mesh), x)
    names = [leaf.name for leaf in zoo.parallel.leaves(grads)]
    return {"loss": float(loss), **dict(zip(names, jax.device_get(jax.tree.leaves(grads)), strict=True))}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        pytest.param({}, {}, id="one device", marks=pytest.mark.slow),
        pytest.param({}, {"capacity_factor": 1.0}, id="with a capacity", marks=pytest.mark.slow),
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, {}, id="on a mesh"),
    ],
)
def test_mxfp4_experts_equal_dequantized(sizes, options):
    """Loss and gradients of trainable parameters before and after the experts equal those with dequantized weights."""
    one_device = zoo.make_mesh(devices=jax.devices()[:1])
    make_linear = partial(Linear, EMBED, EMBED, in_=Dim("in"), out=Dim("embed"), key=KEY)
    layers = eqx.filter_jit(lambda: (make_linear(), make_mixture(**options)))()
    expected = compute_loss_and_grads(dequantize(layers), one_device)
    results = compute_loss_and_grads(layers, zoo.make_mesh(**sizes) if sizes else one_device)
    assert {name.partition(".")[2] for name in expected.keys() - results.keys()} == {
        f"experts.{part}.weight" for part in ("gate", "up", "down")
    }
    for name, result in results.items():
        error = np.abs(result - expected[name]).max()
        assert error <= 2e-5 * np.abs(expected[name]).max(), name


def test_mxfp4_blocks_must_divide_over_devices():
    packed = MXFP4Linear(96, 8, in_=Dim("mlp"), key=KEY)
    with pytest.raises(ValueError, match="blocks: 3 mlp do not divide evenly over tensor=2"):
        zoo.place(packed, zoo.make_mesh(data=4, tensor=2))
