"""The scan over repeating patterns equals the plain loop over layers, and compiles few blocks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import zoo
from zoo.models import find_patterns, swap_stack

KEY = jax.random.key(0)
SIZES = {"vocab": 32, "embed": 16, "layers": 3, "heads": 4, "kv_heads": 2, "mlp": 24}


@eqx.filter_jit
def run(model, tokens):
    return model(tokens)


def test_stack_scan_equals_unrolled_loop():
    model = zoo.models.Transformer(**SIZES, windows=(4, None), qk_norm=True, key=KEY)
    tokens = jax.random.randint(jax.random.key(1), (2, 7), 0, SIZES["vocab"])
    unrolled = swap_stack(model, lambda stack: stack.unstack())
    assert jnp.allclose(run(unrolled, tokens), run(model, tokens), atol=1e-5)
    assert zoo.count(unrolled) == zoo.count(model)
    with pytest.raises(ValueError, match="Embedding has 0 stacks"):
        swap_stack(model.embedding, lambda stack: stack)


@pytest.mark.parametrize(
    "items, expected",
    [
        ("a" * 12, [(1, 12)]),
        ("aab" * 3, [(3, 3)]),
        ("lllllg" * 10 + "ll", [(6, 10), (1, 2)]),
        ("abbb", [(1, 1), (1, 3)]),
        ("a", [(1, 1)]),
    ],
)
def test_find_patterns_compiles_few_blocks(items, expected):
    assert sorted(find_patterns(items)) == sorted(expected)
    assert sum(period * repeats for period, repeats in find_patterns(items)) == len(items)


def test_stack_patterns_do_not_change_parameters():
    repeated = zoo.models.Transformer(**SIZES, windows=(4, 4), key=KEY)
    single = zoo.models.Transformer(**SIZES, windows=(4,), key=KEY)
    assert eqx.tree_equal(repeated, single)
