"""LoRA: initialization, and ranks and scales by pattern."""

from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.adapters.perturb import perturb
from zoo import adapters
from zoo.layers import RGLRU, LatentAttention, Linear, TokenInfo
from zoo.models.targets import find_linears
from zoo.ops.rotary import Rotary

FIXTURES = Path(__file__).parents[2] / "fixtures"


def test_lora_of_two_stacks_with_one_name_draws_different_a():
    """Full and sliding-window attention alternate: two stacked arrays that share a name."""
    wrapped = adapters.lora(zoo.load(FIXTURES / "models/qwen2"), targets="query", rank=2, key=jax.random.key(0))
    first, second = jax.tree.leaves(zoo.trainable(wrapped))[::2]
    assert first.shape == second.shape == (1, 2, 16) and not jnp.array_equal(first, second)


@pytest.mark.parametrize(("rank_stabilized", "scales"), [(False, (2, 3)), (True, (6 / 3**0.5, 6 / 2**0.5))])
def test_rank_pattern_scales_by_the_rank_of_the_module(rank_stabilized, scales):
    """alpha / rank, or alpha / sqrt(rank), where the second layer has rank 2 and not 3."""
    model = zoo.models.Transformer(vocab=8, embed=8, layers=2, heads=2, mlp=8, key=jax.random.key(0))
    options = {"rank": 3, "alpha": 6, "rank_pattern": {r"layers\.1\..*": 2}, "rank_stabilized": rank_stabilized}
    wrapped = adapters.lora(model, targets="query", **options, key=jax.random.key(1))
    (lora,) = [site.module for site in find_linears(wrapped) if isinstance(site.module, adapters.LoRA)]
    np.testing.assert_array_equal(lora.rank, [3, 2])
    np.testing.assert_allclose(lora.scale, scales, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "targets"),
    [
        (partial(RGLRU, 12, 2), ("recurrence_gate", "input_gate")),
        (partial(LatentAttention, 12, 2, latent=6, head_dim=4, rotary=Rotary(2)), ("key_up", "value_up")),
    ],
    ids=["rg_lru", "latent_attention"],
)
def test_lora_head_by_head_equals_the_merged_matrix(make, targets):
    """In a text of several tokens, and in one token after them."""
    layer = make(key=jax.random.key(0))
    wrapped = perturb(adapters.lora(layer, targets=targets, rank=3, key=jax.random.key(1)))
    x = jax.random.normal(jax.random.key(2), (2, 5, 12))

    @eqx.filter_jit
    def run(layer):
        state = layer.init_state(2, 5)
        first, state = layer(x[:, :4], TokenInfo(jnp.arange(4)[None].repeat(2, 0)), state)
        last, _ = layer(x[:, 4:], TokenInfo(jnp.full((2, 1), 4)), state)
        return jnp.concatenate([first, last], 1)

    merged = run(adapters.merge(wrapped))
    np.testing.assert_allclose(run(wrapped), merged, rtol=1e-5, atol=1e-5)
    assert jnp.abs(merged - run(layer)).max() > 1e-3


def test_lora_transposed_equals_the_merged_matrix():
    """Also at another strength, and with a scale that is not 1."""
    lora = adapters.LoRA(Linear(12, 8, key=jax.random.key(0)), max_rank=3, rank=2, scale=1.5, key=jax.random.key(1))
    lora = adapters.set_strength(perturb(lora), {"lora": 0.5})
    y = jax.random.normal(jax.random.key(2), (2, 5, 8))
    np.testing.assert_allclose(lora.transposed(y), y @ lora.dense_weight, rtol=1e-5, atol=1e-5)
    assert jnp.abs(lora.transposed(y) - lora.base.transposed(y)).max() > 1e-3
