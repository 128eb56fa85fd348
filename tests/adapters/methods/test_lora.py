"""LoRA: initialization."""

from pathlib import Path

import jax
import jax.numpy as jnp

import zoo
from zoo import adapters

FIXTURES = Path(__file__).parents[2] / "fixtures"


def test_lora_of_two_stacks_with_one_name_draws_different_a():
    """Full and sliding-window attention alternate: two stacked arrays that share a name."""
    wrapped = adapters.lora(zoo.load(FIXTURES / "models/qwen2"), targets="query", rank=2, key=jax.random.key(0))
    first, second = jax.tree.leaves(zoo.trainable(wrapped))[::2]
    assert first.shape == second.shape == (1, 2, 16) and not jnp.array_equal(first, second)
