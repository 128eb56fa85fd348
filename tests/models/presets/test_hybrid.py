"""Hybrid models: repeating patterns of mixers and of feed-forward layers."""

from functools import partial

import equinox as eqx
import jax
import pytest

import zoo
from zoo.layers import Attention, GatedDeltaNet, GatedMLP
from zoo.ops.rotary import Rotary

KEY = jax.random.key(0)


def test_hybrid_patterns_of_mixers_and_feed_forwards():
    attention = partial(Attention, heads=2, rotary=Rotary(8))
    recurrent = partial(GatedDeltaNet, heads=2)
    model = partial(zoo.models.Hybrid, vocab=32, embed=16, key=KEY)
    hybrid = eqx.filter_eval_shape(model, layers=8, pattern=[recurrent] * 3 + [attention], mlp=24)
    assert [(len(s.blocks), s.local_repeats) for s in hybrid.stack.segments] == [(4, 2)]
    classes = [type(block.mixer).__name__ for block in hybrid.stack.segments[0].blocks]
    assert classes == ["GatedDeltaNet"] * 3 + ["Attention"]
    sparse = eqx.filter_eval_shape(model, layers=4, pattern=[recurrent], ffns=[None, partial(GatedMLP, mlp=8)])
    assert [hasattr(block, "ffn") for block in sparse.stack.segments[0].blocks] == [False, True]
    for wrong in ({"layers": 0, "pattern": [recurrent]}, {"layers": 2, "pattern": []}):
        with pytest.raises(ValueError, match="at least 1 layer"):
            model(**wrong)
    with pytest.raises(ValueError, match="say one of the two"):
        model(layers=2, pattern=[recurrent], mlp=8, ffns=[partial(GatedMLP, mlp=8)])
