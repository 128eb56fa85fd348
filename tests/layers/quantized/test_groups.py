"""Layers of quantized files equal a `Linear` with the dequantized weight."""

import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.inspect import measure_size
from zoo.layers import Linear
from zoo.layers.quantized.groups import GroupQuantizedLinear
from zoo.parallel import Dim


def random_layer(seed=0, *, in_=Dim("in"), out=Dim("out"), **options):
    """Return a layer of 24 inputs and 12 outputs with random numbers."""
    draw = np.random.default_rng(seed)
    fill = {
        "codes": lambda x: draw.integers(0, 120, x.shape, np.uint8),
        "scales": lambda x: np.abs(draw.normal(size=x.shape)).astype(np.float32) / 50,
        "zeros": lambda x: draw.integers(0, 16, x.shape, np.uint8),
        "group_index": lambda x: draw.permutation(x.shape[0]).astype(np.int32) // 8,
    }
    layer = GroupQuantizedLinear(24, 12, in_=in_, out=out, **options)
    for name, make in fill.items():
        if (x := getattr(layer, name)) is not None:
            layer = eqx.tree_at(operator.attrgetter(name), layer, jnp.asarray(make(x)))
    return eqx.tree_at(lambda x: x.bias, layer, jnp.arange(12.0), is_leaf=lambda x: x is None)


def dequantized(layer):
    return layer.to_linear(layer.dense_weight, layer.dense_bias)


LAYERS = {
    "fp8": {"kind": "float8_e4m3fn", "group_size": 10},
    "rows": {"kind": "uint8", "group_size": None},
    "reordered": {"kind": "uint4", "group_size": 8, "has_zeros": True, "reordered": True},
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_a_linear_layer(name):
    layer = random_layer(out=Dim("heads", 4), **LAYERS[name])
    linear = dequantized(layer)
    assert type(linear) is Linear and layer.out_size == 12 and linear.weight.shape == (12, 24)
    draw = np.random.default_rng(1)
    x, y, heads = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in ((2, 24), (2, 12), (2, 3, 24)))

    @eqx.filter_jit
    def run(layer, x, y, heads):
        calls = (layer, layer.transposed, layer.per_head, lambda y: layer.per_head_transposed(y.reshape(-1, 3, 4)))
        results = [jax.vjp(call, given) for call, given in zip(calls, (x, y, heads, y), strict=True)]
        return [(value, back(jnp.cos(value))) for value, back in results]

    for ours, theirs in zip(*(jax.tree.leaves(run(each, x, y, heads)) for each in (layer, linear)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["fp8", "reordered"])
def test_stacked_experts_equal_linear_layers(name):
    layers = [random_layer(seed, **LAYERS[name]) for seed in range(3)]
    stack = lambda modules: jax.tree.map(lambda *x: jnp.stack(x), *modules)
    experts, linear = stack(layers), stack([dequantized(layer) for layer in layers])
    np.testing.assert_array_equal(eqx.filter_vmap(lambda layer: layer.dense_weight)(experts), linear.weight)
    x, sizes = jnp.asarray(np.random.default_rng(1).normal(size=(9, 24)), jnp.float32), jnp.array([4, 0, 3])
    np.testing.assert_allclose(experts.grouped(x, sizes), linear.grouped(x, sizes), atol=1e-4)


def test_only_the_bias_is_trained_and_cast():
    layer = random_layer(**LAYERS["reordered"])
    assert [x.shape for x in jax.tree.leaves(zoo.trainable(layer))] == [(12,)]
    half = zoo.cast(layer, jnp.bfloat16)
    assert half.bias.dtype == jnp.bfloat16 and half.scales.dtype == jnp.float32
    size = measure_size(layer)
    assert size.num_parameters == 12 * 24 + 12
    assert size.bytes == 12 * 12 + 4 * 12 * 3 + 12 * 3 + 4 * 24 + 4 * 12


def test_odd_inputs_fill_no_bytes():
    with pytest.raises(ValueError, match="two codes share a byte, and the inputs are odd: 9"):
        GroupQuantizedLinear(9, 4, kind="uint4", group_size=4)
    with pytest.raises(ValueError, match="the inputs are odd: 12, 3 to each of heads"):
        GroupQuantizedLinear(12, 4, kind="uint4", group_size=4, in_=Dim("heads", 3))


def test_a_sum_is_not_quantized_again():
    layer = random_layer(**LAYERS["rows"])
    with pytest.raises(NotImplementedError, match="is not quantized again"):
        layer.repack(layer.dense_weight, None)
