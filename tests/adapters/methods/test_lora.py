"""LoRA: initialization, and ranks and scales by pattern."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo import adapters

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
    (lora,) = [site.module for site in adapters.find_linears(wrapped) if isinstance(site.module, adapters.LoRA)]
    np.testing.assert_array_equal(lora.rank, [3, 2])
    np.testing.assert_allclose(lora.scale, scales, rtol=1e-6)
