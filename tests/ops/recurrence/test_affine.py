"""Affine maps of recurrences: the pieces of a sequence, joined by their maps, equal the whole, with gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recurrences import BATCH, KEY_DIM, all_close, draw_delta, draw_gated, run_in_pieces
from zoo.ops.recurrence.affine import DenseAffineMap, DiagonalAffineMap
from zoo.ops.recurrence.gated_linear import chunked_gated_linear
from zoo.ops.recurrence.generalized_delta import chunked_delta

SEQ = 33
TWO, THREE, FOUR = (16,), (5, 17), (5, 16, 17)
"""Where the sequence is cut: pieces of one chunk and of several, and of a single token."""
GATED = {"number": FOUR, "bonus": TWO}
DELTA = {("number", 1, False): THREE, ("vector", 2, True): TWO}
"""Decays, steps and `read_before_decay`."""


@partial(jax.jit, static_argnums=(0, 1))
def with_gradients(op, cuts, inputs, ids, weights):
    """Return outputs, last state and their weighted sum's gradients, of the whole or of pieces."""

    def run(inputs):
        if not cuts:
            return op(inputs, ids, None)
        split = {name: jnp.split(x, [cut * x.shape[1] // SEQ for cut in cuts], axis=1) for name, x in inputs.items()}
        pieces = [{name: parts[i] for name, parts in split.items()} for i in range(len(cuts) + 1)]
        return run_in_pieces(op, pieces, jnp.split(ids, cuts, axis=1))

    found, back = jax.vjp(run, inputs)
    return found, back(weights)[0]


def gated(inputs, ids, state, bonus=None):
    operands = (inputs[name] for name in ("query", "key", "value"))
    decay = inputs.get("log_decay")
    return chunked_gated_linear(*operands, decay, bonus=bonus, segment_ids=ids, state=state, scale=0.5, chunk_size=8)


def gated_with_bonus(inputs, ids, state):
    return gated(inputs, ids, state, jnp.linspace(-1, 1, 2 * KEY_DIM).reshape(2, KEY_DIM))


def delta(steps, before, inputs, ids, state):
    return chunked_delta(
        **inputs, steps=steps, read_before_decay=before, segment_ids=ids, state=state, scale=0.5, chunk_size=8
    )


DELTA_OPS = {case: partial(delta, *case[1:]) for case in DELTA}


def compare(op, cuts, inputs, often, seed):
    draw = np.random.default_rng(seed)
    ids = jnp.asarray((draw.random((BATCH, SEQ)) < often).cumsum(1))
    outputs = jax.eval_shape(lambda inputs: op(inputs, ids, None), inputs)
    weights = jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape), jnp.float32), outputs)
    found, expected = (with_gradients(op, cuts, inputs, ids, weights) for cuts in (cuts, ()))
    all_close(found[0], expected[0], 1e-5)
    all_close(found[1], expected[1], 5e-5)


@pytest.mark.slow
@settings(max_examples=6)
@given(
    kind=st.sampled_from(sorted(GATED)),
    often=st.sampled_from([0.0, 0.1, 0.6]),
    strength=st.sampled_from([1.0, 20.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_pieces_of_gated_linear_equal_the_whole(kind, often, strength, seed):
    drawn = draw_gated(SEQ, "vector" if kind == "bonus" else kind, seed=seed, strength=strength)
    inputs = dict(zip(("query", "key", "value", "log_decay"), drawn[:4], strict=True))
    inputs = {name: x for name, x in inputs.items() if x is not None}
    compare(gated_with_bonus if kind == "bonus" else gated, GATED[kind], inputs, often, seed)


@pytest.mark.slow  # docs/ideas.md joins the pieces of four devices
@settings(max_examples=6)
@given(
    case=st.sampled_from(sorted(DELTA)),
    often=st.sampled_from([0.0, 0.1, 0.6]),
    strength=st.sampled_from([0.1, 20.0]),
    seed=st.integers(0, 99),
)
def test_pieces_of_a_delta_rule_equal_the_whole(case, often, strength, seed):
    inputs = draw_delta(SEQ, *case[:2], seed, strength)
    del inputs["state"]
    compare(DELTA_OPS[case], DELTA[case], inputs, often, seed)


def test_maps_compose_in_order_and_forget_where_fresh():
    draw = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(draw.normal(size=(BATCH, 1, *shape)), jnp.float32)
    for make in (
        lambda: DiagonalAffineMap(normal(4, 1), normal(4, 3)),
        lambda: DenseAffineMap(normal(4, 4), normal(4, 3)),
    ):
        first, second, state = make(), make(), normal(4, 3)
        all_close(first.then(second).apply(state), second.apply(first.apply(state)), 1e-6)
        after = first.then(second.reset(jnp.array([True, False]))).apply(state)
        all_close(after, jnp.stack([second.offset[0], second.apply(first.apply(state))[1]]), 1e-6)
