"""Merging: repeated merges are exact, and a packed base is decoded or quantized again."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.adapters.perturb import perturb
from zoo import adapters
from zoo.layers import MXFP4Linear

KEY = jax.random.key(0)
TOKENS = jax.random.randint(KEY, (8, 8), 0, 32)


@pytest.mark.ci
def test_merge_and_unmerge_are_exact_a_hundred_times():
    model = zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=4, kv_heads=2, mlp=24, key=KEY)
    wrapped = adapters.dora(model, targets=("query", "value", "down"), rank=2, key=jax.random.key(1))
    run = eqx.filter_jit(lambda model: model(TOKENS))
    wrapped = zoo.cast(perturb(wrapped), jnp.bfloat16)
    merge, unmerge = eqx.filter_jit(lambda model: adapters.merge(model, keep=True)), eqx.filter_jit(adapters.unmerge)
    again = wrapped
    for _ in range(100):
        merged = merge(again)
        again = unmerge(merged)
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), again, wrapped))
    scale = float(jnp.abs(run(wrapped)).max())
    np.testing.assert_allclose(run(merged), run(wrapped), atol=0.05 * scale)  # W + B A is rounded to bfloat16
    with pytest.raises(ValueError, match="keep=True"):
        adapters.unmerge(wrapped)


@pytest.mark.ci
def test_lora_of_a_packed_linear():
    """The packed base does not change; merging needs an explicit choice of format."""
    keys = jax.random.split(KEY)
    packed = MXFP4Linear(32, 8, key=keys[0])
    lora = adapters.LoRA(packed, max_rank=2, rank=2, scale=1.0, key=keys[1])
    lora = eqx.tree_at(lambda lora: lora.up.weight, lora, jnp.ones((8, 2)))
    x = jax.random.normal(KEY, (3, 32))
    expected = x @ (packed.dense_weight + jnp.ones((8, 2)) @ lora.down.weight).T
    np.testing.assert_allclose(lora(x), expected, atol=1e-5)
    np.testing.assert_allclose(lora.dense_weight, packed.dense_weight + jnp.ones((8, 2)) @ lora.down.weight, atol=1e-6)
    with pytest.raises(ValueError, match="quantized='decode'.*quantized='round'"):
        adapters.merge(lora)
    np.testing.assert_array_equal(adapters.merge(lora, quantized="decode").weight, lora.dense_weight)
    rounded = adapters.merge(lora, quantized="round", keep=True)
    largest = jnp.abs(lora.dense_weight).max(-1, keepdims=True)  # each row is one block
    assert (
        isinstance(rounded.base, MXFP4Linear)
        and (jnp.abs(rounded.dense_weight - lora.dense_weight) <= largest / 4).all()
    )
    assert eqx.tree_equal(adapters.unmerge(rounded), lora)
    with pytest.raises(NotImplementedError, match="MXFP4 is rounded.*'pissa' or 'olora'"):
        adapters.LoRA(packed, max_rank=2, rank=2, scale=1.0, init="pissa", key=KEY)


@pytest.mark.ci
def test_save_of_a_model_with_adapters_names_merge(tmp_path):
    model = zoo.models.Transformer(vocab=32, embed=16, layers=1, heads=2, mlp=24, key=jax.random.key(0))
    adapted = adapters.lora(model, key=jax.random.key(1))
    for other in (adapted, adapters.merge(adapted, keep=True), adapters.unfreeze(model, "norm")):
        with pytest.raises(zoo.CheckpointError, match=r"zoo.adapters.merge\(model\) .* zoo.adapters.save\(model, dir"):
            zoo.save(other, tmp_path)
    assert not list(tmp_path.iterdir())
