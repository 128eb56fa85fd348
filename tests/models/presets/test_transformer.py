"""The Transformer preset: initialization scale, sizes that do not fit together, and how many blocks it compiles."""

from functools import partial

import equinox as eqx
import jax
import pytest

import zoo

KEY = jax.random.key(0)
SIZES = {"vocab": 32, "embed": 16, "layers": 3, "heads": 4, "kv_heads": 2, "mlp": 24}


@pytest.mark.slow  # test_published.py has the scales
def test_transformer_initial_logits_do_not_depend_on_depth():
    """Their standard deviation is of the order of 1."""
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, SIZES["vocab"])
    for layers in (1, 8):
        model = zoo.models.Transformer(**{**SIZES, "embed": 64, "layers": layers}, tied=False, key=KEY)
        assert 0.5 < eqx.filter_jit(model)(tokens).std() < 2


def test_transformer_shares_blocks_of_equal_windows():
    """Compile time grows with the pattern of windows, not with the depth."""
    for windows, expected in (((None,), [(1, 24)]), ((4, 4), [(1, 24)]), ((4, 4, None), [(3, 8)])):
        make = partial(zoo.models.Transformer, **SIZES | {"layers": 24}, windows=windows)
        segments = eqx.filter_eval_shape(make, key=KEY).stack.segments
        assert [(len(segment.blocks), segment.num_repeats) for segment in segments] == expected


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kv_heads": 3}, "4 heads do not divide evenly over 3 kv_heads"),
        ({"heads": 3, "kv_heads": 3}, "embed=16 does not divide evenly over 3 heads"),
        ({"windows": (0,)}, "a window holds at least 1 token"),
        ({"layers": 0}, "at least 1 layer"),
        ({"dropout": 1.0}, "at least 0 and less than 1"),
    ],
)
def test_transformer_refuses_sizes_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        zoo.models.Transformer(**SIZES | options, key=KEY)
