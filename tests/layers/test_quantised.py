"""A matrix in int8 or NF4 multiplies as the one that it stands for, on one device and on a mesh."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import Int8Linear, Linear, NF4Linear
from zoo.parallel import Dim

KEY = jax.random.key(0)
KINDS = [Int8Linear, NF4Linear]


def both(kind, in_size, out_size, *, in_=Dim("in"), out=Dim("out"), bias=True):
    """A packed matrix, and a `Linear` of the same numbers."""
    linear = Linear(in_size, out_size, in_=in_, out=out, bias=bias, key=KEY)
    linear = eqx.tree_at(lambda x: x.bias, linear, jnp.arange(out_size) / 7.0) if bias else linear
    packed = kind(linear.dense_weight, linear.dense_bias, in_=in_, out=out)
    return packed, packed.to_linear(packed.dense_weight, packed.dense_bias)


@pytest.mark.parametrize("kind", KINDS)
def test_alone(kind):
    packed, plain = both(kind, 128, 5)
    x, y = jax.random.normal(KEY, (2, 3, 128)), jax.random.normal(KEY, (2, 3, 5))
    assert type(plain) is Linear and packed.out_size == 5
    np.testing.assert_array_equal(packed.dense_weight, plain.weight)
    np.testing.assert_array_equal(packed.dense_bias, plain.bias)
    drawn = Linear(128, 5, key=KEY).weight
    assert 0 < jnp.abs(packed.dense_weight - drawn).max() < 0.17 * jnp.abs(drawn).max()
    np.testing.assert_allclose(packed(x), plain(x), atol=1e-5)
    np.testing.assert_allclose(packed.transposed(y), plain.transposed(y), atol=1e-5)
    half = zoo.cast(packed, jnp.bfloat16)(x.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), plain(x), atol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_as_experts(kind):
    keys = jax.random.split(KEY, 3)
    weights = jax.vmap(lambda key: jax.random.normal(key, (5, 64)))(keys)
    make = lambda weight: kind(weight, weight[:, 0], in_=Dim("in"), out=Dim("out"))
    packed = eqx.filter_vmap(make)(weights)
    plain = eqx.filter_vmap(lambda packed: packed.to_linear(packed.dense_weight, packed.dense_bias))(packed)
    assert packed.out_size == 5
    x, sizes = jax.random.normal(KEY, (9, 64)), jnp.array([4, 0, 3])
    np.testing.assert_allclose(packed.grouped(x, sizes), plain.grouped(x, sizes), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_only_its_bias_is_learnt_and_cast(kind):
    """Scales and offsets are no smaller in half precision: they would be off by more than codes are."""
    packed, _ = both(kind, 64, 5)
    assert [x.shape for x in jax.tree.leaves(zoo.trainable(packed))] == [(5,)] and zoo.count(packed) == 5
    half = zoo.cast(packed, jnp.bfloat16)
    assert [x.dtype for x in half.packed_arrays] == [x.dtype for x in packed.packed_arrays]
    assert half.bias.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half.dense_weight, packed.dense_weight)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_again(kind):
    """Another matrix is rounded as the first was, and its bias keeps its dtype."""
    packed, _ = both(kind, 128, 5)
    other = jax.random.normal(jax.random.key(1), (5, 128))
    again = zoo.cast(packed, jnp.bfloat16).repack(other, jnp.ones(5))
    expected = kind(other, jnp.ones(5, jnp.bfloat16), in_=packed.in_, out=packed.out)
    assert eqx.tree_equal(again, expected)
    assert packed.to_linear(other, None).bias is None
    with pytest.raises(NotImplementedError, match=f"in {kind.format} is rounded.*'pissa' or 'olora'"):
        packed.with_weight(other, None)


@pytest.mark.parametrize(
    ("in_size", "in_", "says"),
    [
        (96, Dim("in"), "NF4 packs .* of 64, and 96 are no whole blocks: take int8"),
        (192, Dim("heads", 96), "192, 96 to each of heads, are"),
    ],
)
def test_blocks_are_whole(in_size, in_, says):
    with pytest.raises(ValueError, match=says):
        NF4Linear(jnp.ones((8, in_size)), in_=in_, out=Dim("out"))
    assert Int8Linear(jnp.ones((8, in_size)), in_=in_, out=Dim("out")).out_size == 8


def loss_fn(layers, x):
    up, out = zoo.parallel.gather(layers)
    inner = jnp.tanh(up(x))
    split = zoo.parallel.reduce((out.transposed(x) * inner).sum(), over="heads")
    return (out(inner) ** 2).sum() + (up.transposed(inner) ** 2).sum() + split, jnp.float32(len(x))


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_mesh(kind):
    """Split over what they contract and over what they give, forward and transposed."""
    heads = Dim("heads", 64)
    up = both(kind, 128, 256, in_=Dim("embed"), out=heads)
    out = both(kind, 256, 128, in_=heads, out=Dim("embed"))
    x = jax.random.normal(KEY, (8, 3, 128))
    found = []
    for layers, sizes in (((up[0], out[0]), {"data": 2, "fsdp": 2, "tensor": 2}), ((up[1], out[1]), {})):
        mesh = zoo.make_mesh(**sizes) if sizes else zoo.make_mesh(devices=jax.devices()[:1])
        found.append(zoo.value_and_grad(loss_fn, mesh)(zoo.place(layers, mesh), x))
    (loss, gradients), (their_loss, theirs) = found
    np.testing.assert_allclose(loss, their_loss, rtol=1e-5)
    for ours, others in zip(gradients, theirs, strict=True):
        assert jax.tree.leaves(ours) == [ours.bias]
        np.testing.assert_allclose(ours.bias, others.bias, atol=2e-5 * float(jnp.abs(others.bias).max()))


def test_blocks_that_do_not_share_out_are_told():
    packed, _ = both(NF4Linear, 192, 8, in_=Dim("mlp"))
    with pytest.raises(ValueError, match="codes: 3 mlp do not share out over tensor=2"):
        zoo.place(packed, zoo.make_mesh(data=4, tensor=2))
