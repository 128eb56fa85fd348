"""Decoding states: KV caches grow with the length, recurrent states do not."""

from functools import partial

import equinox as eqx
import jax

import zoo
from zoo.inspect import state_bytes
from zoo.layers import Attention, DeltaNet


def test_state_bytes_of_a_hybrid_model():
    pattern = [partial(DeltaNet, heads=2), partial(Attention, heads=2)]
    make = partial(zoo.models.Hybrid, vocab=8, embed=8, layers=2, pattern=pattern)
    shapes = eqx.filter_eval_shape(make, key=jax.random.key(0))
    matrix, windows, counter = 2 * 4 * 4 * 4, 3 * 3 * 8 * 4, 2 * 4  # tokens written, and RoPE's length
    slot = 2 * 8 * 4 + 4  # a key, a value and their position
    assert [state_bytes(shapes, n) - matrix - windows - counter for n in (1, 50)] == [slot, 50 * slot]
    model = make(key=jax.random.key(0))
    assert state_bytes(model, 50) == sum(x.nbytes for x in jax.tree.leaves(model.init_state(1, 50)))
