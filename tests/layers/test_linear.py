"""Linear layers: matmul, transpose, per-head matmul, and initialization."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.quick import mark_slow
from zoo.layers import Embedding, Linear
from zoo.parallel import Dim, num_shards, reduce
from zoo.parallel.collectives import shard_offset

KEY = jax.random.key(0)


def test_linear_and_its_transpose_equal_matmuls():
    linear = Linear(3, 5, bias=True, key=KEY)
    linear = eqx.tree_at(lambda x: x.bias, linear, jnp.arange(5.0))
    x, y = jax.random.normal(KEY, (2, 4, 3)), jax.random.normal(KEY, (2, 4, 5))
    assert jnp.allclose(linear(x), x @ linear.weight.T + jnp.arange(5.0), atol=1e-6)
    assert jnp.allclose(linear.transposed(y), y @ linear.weight, atol=1e-6)
    assert linear.out_size == 5


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_linear_initialization_has_the_given_variance(scale):
    weight = Linear(400, 300, scale=scale, key=KEY).weight * 400**0.5 / scale
    assert abs(float(weight.std()) - 1) < 0.01
    assert float(jnp.abs(weight).max()) < 2 / 0.8796
    assert abs(float(Embedding(400, 300, scale=0.5, key=KEY).weight.std()) - 0.5) < 0.005


def naive_per_head(linear, x, transposed):
    """Multiply each head with its rows of W."""
    unit, outputs = linear.out.unit, []
    for h in range(x.shape[-2]):
        rows = linear.weight[h * unit : (h + 1) * unit]
        bias = 0 if linear.bias is None else linear.bias[h * unit : (h + 1) * unit]
        outputs.append(x[..., h, :] @ (rows if transposed else rows.T) + (0 if transposed else bias))
    return jnp.stack(outputs, -2)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("transposed", "bias"),
    mark_slow(itertools.product((False, True), repeat=2), but=[(False, True), (True, True)]),
)
def test_linear_per_head_equals_a_loop_over_heads(transposed, bias):
    """Values and gradients, with replicated and with sharded heads."""
    linear = Linear(5, 4 * 3, in_=Dim("latent"), out=Dim("heads", 3), bias=bias, key=KEY)
    linear = eqx.tree_at(lambda x: x.bias, linear, jnp.arange(12.0)) if bias else linear
    x = jax.random.normal(KEY, (8, 2, 4, 3 if transposed else 5))
    weights = jax.random.normal(jax.random.key(1), (8, 2, 4, 5 if transposed else 3))

    def loss(linear, batch):
        heads = 4 // num_shards(linear.weight, "heads")
        start = shard_offset(linear.weight, "heads", heads)
        local_heads = lambda values: jax.lax.dynamic_slice_in_dim(values, start, heads, axis=-2)
        multiply = linear.per_head_transposed if transposed else linear.per_head
        product = (multiply(local_heads(batch["x"])) * local_heads(batch["weights"])).sum()
        return reduce(product, over="heads"), jnp.float32(1)

    def expected(linear):
        return (naive_per_head(linear, x, transposed) * weights).sum()

    expected_value, expected_grads = eqx.filter_value_and_grad(expected)(linear)
    batch = {"x": x, "weights": weights}
    for mesh in (zoo.make_mesh(devices=jax.devices()[:1]), zoo.make_mesh(data=2, fsdp=2, tensor=2)):
        value, grads = zoo.value_and_grad(loss, mesh)(zoo.place(linear, mesh), batch)
        count = mesh.shape["data"] * mesh.shape["fsdp"]  # each device returns a count of 1
        assert value * count == pytest.approx(float(expected_value), rel=1e-5)
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
            assert np.abs(count * a - b).max() <= 1e-5 * max(np.abs(b).max(), 1e-3)


def test_linear_without_heads_rejects_per_head():
    class Diagonal(zoo.layers.AbstractLinear):
        scale: jax.Array

        def __call__(self, x):
            return self.scale * x

        def transposed(self, x):
            return self.scale * x

        @property
        def out_size(self):
            return 1

    for multiply in (Diagonal(None).per_head, Diagonal(None).per_head_transposed):
        with pytest.raises(NotImplementedError, match="Diagonal multiplies no head by itself"):
            multiply(jnp.ones((1, 1, 1)))
