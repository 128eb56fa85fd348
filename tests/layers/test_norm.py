"""RMSNorm and LayerNorm, on one device and over a sharded dim."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import zoo
from zoo import Layout
from zoo.layers import LayerNorm, Linear, RMSNorm
from zoo.layers.norm import PerHeadLayerNorm, StreamNorm
from zoo.parallel import Dim

KEY = jax.random.key(0)


def test_norms_normalize_and_keep_float32_weights():
    x = 3 + 2 * jax.random.normal(KEY, (2, 3, 8))
    for norm in (RMSNorm(8), RMSNorm(8, offset=1.0)):
        assert jnp.allclose((norm(x) ** 2).mean(-1), 1, atol=1e-4)
    assert jnp.allclose(LayerNorm(8)(x).mean(-1), 0, atol=1e-5) and jnp.allclose(LayerNorm(8)(x).std(-1), 1, atol=1e-4)
    assert LayerNorm(8, bias=False).bias is None
    assert zoo.cast(LayerNorm(8), jnp.bfloat16).weight.dtype == jnp.float32
    assert RMSNorm(8)(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_each_stream_has_a_norm():
    x = jax.random.normal(KEY, (1, 2, 2, 4)) * jnp.array([1, 100])[:, None]
    norm = eqx.tree_at(lambda norm: norm.weight, StreamNorm(4, 2, offset=1.0), jnp.arange(8.0))
    expected = [RMSNorm(4)(x[:, :, stream]) * (1 + norm.weight[4 * stream :][:4]) for stream in range(2)]
    assert jnp.allclose(norm(x.reshape(1, 2, 8)), jnp.concatenate(expected, axis=-1), rtol=1e-5)


@pytest.mark.parametrize("norm_class", [RMSNorm, LayerNorm])
def test_norm_over_a_sharded_dim_equals_one_device(norm_class):
    mesh = zoo.make_mesh(data=4, tensor=2, layout=Layout().with_dims(embed=("tensor",)))
    linear, norm = Linear(3, 8, out=Dim("embed"), key=KEY), norm_class(8)
    norm = eqx.tree_at(lambda norm: norm.weight, norm, jnp.arange(1.0, 9.0))
    x = jax.random.normal(KEY, (4, 2, 3))
    sharded = zoo.spmd(lambda norm, linear, x: norm(linear(x)), mesh, out="batch seq embed")(norm, linear, x)
    assert jnp.allclose(sharded, norm(linear(x)), atol=1e-5)


def test_per_head_norm_on_a_mesh_equals_its_formula():
    mesh = zoo.make_mesh(data=4, tensor=2)
    features = Dim("heads", 2)
    linear, norm = Linear(3, 8, out=features, key=KEY), PerHeadLayerNorm(8, features=features, epsilon=1e-3)
    scales = jnp.arange(1.0, 9.0).reshape(4, 2)
    norm = eqx.tree_at(lambda norm: norm.norms.weight, norm, scales)
    x = jax.random.normal(KEY, (4, 2, 3))
    sharded = zoo.spmd(lambda norm, linear, x: norm(linear(x)), mesh, out="batch seq heads")(norm, linear, x)
    heads = linear(x).reshape(4, 2, 4, 2)
    expected = scales * (heads - heads.mean(-1, keepdims=True)) / jnp.sqrt(heads.var(-1, keepdims=True) + 1e-3)
    assert jnp.allclose(sharded, expected.reshape(4, 2, 8), atol=1e-5)
