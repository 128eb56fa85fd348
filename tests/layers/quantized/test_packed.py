"""Int8 and NF4 linear layers equal a `Linear` with the dequantized weight, on one device and on a mesh."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import Linear
from zoo.layers.quantized.linear import Int8Linear, NF4Linear
from zoo.parallel import Dim

KEY = jax.random.key(0)
FORMATS = [Int8Linear, NF4Linear]


def make_pair(layer_class, in_size, out_size, *, in_=Dim("in"), out=Dim("out"), bias=True):
    """Return a quantized layer, and a `Linear` with its dequantized weight."""
    linear = Linear(in_size, out_size, in_=in_, out=out, bias=bias, key=KEY)
    linear = eqx.tree_at(lambda x: x.bias, linear, jnp.arange(out_size) / 7.0) if bias else linear
    packed = layer_class(linear.dense_weight, linear.dense_bias, in_=in_, out=out)
    return packed, packed.to_linear(packed.dense_weight, packed.dense_bias)


@pytest.mark.one_case
@pytest.mark.parametrize("layer_class", FORMATS)
def test_quantized_linear_equals_dequantized(layer_class):
    packed, linear = make_pair(layer_class, 128, 5)
    x, y = jax.random.normal(KEY, (2, 3, 128)), jax.random.normal(KEY, (2, 3, 5))
    assert type(linear) is Linear and packed.out_size == 5
    np.testing.assert_array_equal(packed.dense_weight, linear.weight)
    np.testing.assert_array_equal(packed.dense_bias, linear.bias)
    original = Linear(128, 5, key=KEY).weight
    assert 0 < jnp.abs(packed.dense_weight - original).max() < 0.17 * jnp.abs(original).max()
    np.testing.assert_allclose(packed(x), linear(x), atol=1e-5)
    np.testing.assert_allclose(packed.transposed(y), linear.transposed(y), atol=1e-5)
    half = zoo.cast(packed, jnp.bfloat16)(x.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), linear(x), atol=0.05)


@pytest.mark.one_case
@pytest.mark.parametrize("layer_class", FORMATS)
def test_quantized_experts_equal_dequantized(layer_class):
    keys = jax.random.split(KEY, 3)
    weights = jax.vmap(lambda key: jax.random.normal(key, (5, 64)))(keys)
    make = lambda weight: layer_class(weight, weight[:, 0], in_=Dim("in"), out=Dim("out"))
    packed = eqx.filter_vmap(make)(weights)
    linear = eqx.filter_vmap(lambda packed: packed.to_linear(packed.dense_weight, packed.dense_bias))(packed)
    assert packed.out_size == 5
    x, sizes = jax.random.normal(KEY, (9, 64)), jnp.array([4, 0, 3])
    np.testing.assert_allclose(packed.grouped(x, sizes), linear.grouped(x, sizes), atol=1e-4)


@pytest.mark.parametrize("layer_class", FORMATS)
def test_quantized_linear_trains_and_casts_only_its_bias(layer_class):
    """Scales and offsets stay float32: in half precision their rounding would exceed that of the codes."""
    packed, _ = make_pair(layer_class, 64, 5)
    assert [x.shape for x in jax.tree.leaves(zoo.trainable(packed))] == [(5,)] and zoo.count(packed) == 5
    half = zoo.cast(packed, jnp.bfloat16)
    assert [x.dtype for x in half.packed_arrays] == [x.dtype for x in packed.packed_arrays]
    assert half.bias.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half.dense_weight, packed.dense_weight)


@pytest.mark.parametrize("layer_class", FORMATS)
def test_repack_quantizes_another_weight(layer_class):
    """Repacking equals quantizing the other weight, and keeps the dtype of the bias."""
    packed, _ = make_pair(layer_class, 128, 5)
    other = jax.random.normal(jax.random.key(1), (5, 128))
    repacked = zoo.cast(packed, jnp.bfloat16).repack(other, jnp.ones(5))
    expected = layer_class(other, jnp.ones(5, jnp.bfloat16), in_=packed.in_, out=packed.out)
    assert eqx.tree_equal(repacked, expected)
    assert packed.to_linear(other, None).bias is None
    with pytest.raises(NotImplementedError, match=f"in {layer_class.format} is rounded.*'pissa' or 'olora'"):
        packed.with_weight(other, None)


@pytest.mark.parametrize(
    ("in_size", "in_", "message"),
    [
        (96, Dim("in"), "NF4 packs .* of 64, and 96 are not whole blocks: take int8"),
        (192, Dim("heads", 96), "192, 96 to each of heads, are"),
    ],
)
def test_nf4_linear_rejects_partial_blocks(in_size, in_, message):
    with pytest.raises(ValueError, match=message):
        NF4Linear(jnp.ones((8, in_size)), in_=in_, out=Dim("out"))
    assert Int8Linear(jnp.ones((8, in_size)), in_=in_, out=Dim("out")).out_size == 8


def loss_fn(layers, x):
    up, out = zoo.parallel.gather(layers)
    inner = jnp.tanh(up(x))
    transposed = zoo.parallel.reduce((out.transposed(x) * inner).sum(), over="heads")
    return (out(inner) ** 2).sum() + (up.transposed(inner) ** 2).sum() + transposed, jnp.float32(len(x))


@pytest.mark.slow
@pytest.mark.parametrize("layer_class", FORMATS)
def test_quantized_linear_on_a_mesh_equals_one_device(layer_class):
    """Sharded over the contracted dim and over the output dim, forward and transposed."""
    heads = Dim("heads", 64)
    up = make_pair(layer_class, 128, 256, in_=Dim("embed"), out=heads)
    out = make_pair(layer_class, 256, 128, in_=heads, out=Dim("embed"))
    x = jax.random.normal(KEY, (8, 3, 128))
    results = []
    for layers, sizes in (((up[0], out[0]), {"data": 2, "fsdp": 2, "tensor": 2}), ((up[1], out[1]), {})):
        mesh = zoo.make_mesh(**sizes) if sizes else zoo.make_mesh(devices=jax.devices()[:1])
        results.append(zoo.value_and_grad(loss_fn, mesh)(zoo.place(layers, mesh), x))
    (loss, grads), (expected_loss, expected_grads) = results
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for actual, expected in zip(grads, expected_grads, strict=True):
        assert jax.tree.leaves(actual) == [actual.bias]
        tolerance = 2e-5 * float(jnp.abs(expected.bias).max())
        np.testing.assert_allclose(actual.bias, expected.bias, atol=tolerance)


def test_nf4_blocks_must_divide_over_devices():
    packed, _ = make_pair(NF4Linear, 192, 8, in_=Dim("mlp"))
    with pytest.raises(ValueError, match="codes: 3 mlp do not divide evenly over tensor=2"):
        zoo.place(packed, zoo.make_mesh(data=4, tensor=2))
