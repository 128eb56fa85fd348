"""The generalized delta rule: chunked equals recurrent, in values and gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.recurrences import BATCH, HEADS, KEY_DIM, VALUE_DIM, all_close, draw_delta
from zoo.ops.recurrence import generalized_delta

CASES = [
    (1, "number", 1, False),
    (7, "vector", 1, True),
    (16, "none", 1, False),
    (17, "number", 2, False),
    (17, "vector", 2, True),
    (33, "number", 1, True),
    (33, "vector", 1, False),
]
"""Tokens, decays, steps, read_before_decay: one chunk of 16 rows, several, and partial ones."""
QUICK = [(17, "number", 2, False), (33, "vector", 1, True)]


def segments(seq, often, seed):
    """Segment ids that change at a token with this probability."""
    return jnp.asarray((np.random.default_rng(seed).random((BATCH, seq)) < often).cumsum(1))


@partial(jax.jit, static_argnums=(0, 1, 2))
def value_and_gradients(delta, steps, before, inputs, segment_ids, cotangents):
    def outputs(inputs):
        names = {name: x for name, x in inputs.items() if name != "query"}
        return delta(
            inputs["query"], **names, steps=steps, read_before_decay=before, segment_ids=segment_ids, scale=0.5
        )

    found, back = jax.vjp(outputs, inputs)
    return found, back(cotangents)[0]


small_chunks = partial(generalized_delta.chunked_delta, chunk_size=16)


@pytest.mark.slow  # two cases are in the next test
@settings(max_examples=6)
@given(
    case=st.sampled_from(CASES),
    often=st.sampled_from([0.0, 0.1, 0.6]),
    strength=st.sampled_from([0.1, 20.0]),
    seed=st.integers(0, 99),
)
@example(case=CASES[4], often=0.1, strength=1.0, seed=0)
@example(case=CASES[5], often=0.1, strength=1.0, seed=0)
def test_chunked_delta_of_any_case_equals_recurrent(case, often, strength, seed):
    check_chunked_equals_recurrent(case, often, strength, seed)


@pytest.mark.one_case
@pytest.mark.parametrize("case", QUICK)
def test_chunked_delta_equals_recurrent_with_gradients(case):
    for often, strength, seed in ((0.1, 1.0, 0), (0.0, 20.0, 1), (0.6, 0.1, 2)):
        check_chunked_equals_recurrent(case, often, strength, seed)


def check_chunked_equals_recurrent(case, often, strength, seed):
    seq, decays, steps, before = case
    inputs, segment_ids = draw_delta(seq, decays, steps, seed, strength), segments(seq, often, seed)
    keys = jax.random.split(jax.random.key(seed))
    cotangents = (
        jax.random.normal(keys[0], (BATCH, seq, HEADS, VALUE_DIM)),
        jax.random.normal(keys[1], (BATCH, HEADS, KEY_DIM, VALUE_DIM)),
    )
    found = value_and_gradients(small_chunks, steps, before, inputs, segment_ids, cotangents)
    expected = value_and_gradients(generalized_delta.recurrent_delta, steps, before, inputs, segment_ids, cotangents)
    all_close(found[0], expected[0], 2e-5)
    all_close(found[1], expected[1], 1e-4)


@pytest.mark.slow
def test_chunked_delta_of_bfloat16():
    """Bound: operands are rounded to 2^-9 several times between input and output, and errors of rows propagate."""
    inputs = draw_delta(33, "number", 1, seed=3, dtype=jnp.bfloat16)
    fp32 = {name: x.astype(jnp.float32) for name, x in inputs.items()}
    output, state = small_chunks(**inputs)
    assert output.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    expected = jax.jit(generalized_delta.recurrent_delta)(**fp32)
    all_close((output, state), expected, 2**-6)


@pytest.mark.parametrize(("decays", "before"), [("number", False), ("vector", True)])
def test_chunked_delta_of_strong_decays_is_finite(decays, before):
    seq = 33
    inputs = draw_delta(seq, decays, 1, seed=2)
    cotangents = jnp.ones((BATCH, seq, HEADS, VALUE_DIM)), inputs["state"]
    for strength in (20.0, 1e4):
        inputs["log_decay"] = jnp.full_like(inputs["log_decay"], -strength)
        found = value_and_gradients(small_chunks, 1, before, inputs, segments(seq, 0, 0), cotangents)
        assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(found))


def test_chunked_delta_does_not_save_all_states():
    seq, width = 256, 32
    shapes = [(1, seq, 1, width)] * 4
    loss = lambda *x: (generalized_delta.chunked_delta(*x, chunk_size=16)[0] ** 2).sum()
    program = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    assert program.compile().memory_analysis().temp_size_in_bytes < seq * width * width * 4


def test_generalized_delta_raises_for_bad_arguments():
    inputs = draw_delta(4, "none", 1, seed=0)
    query, read, write, write_value, key = (inputs[name] for name in ("query", "read", "write", "write_value", "key"))
    with pytest.raises(ValueError, match="2 steps for each of 4 tokens are 8 rows, and there are 4"):
        generalized_delta.recurrent_delta(query, read, write, write_value, steps=2)
    with pytest.raises(ValueError, match="keys and values, or neither"):
        generalized_delta.chunked_delta(query, read, write, write_value, key=key)
    with pytest.raises(ValueError, match="write_value or value"):
        generalized_delta.chunked_delta(query, read, write)
    with pytest.raises(ValueError, match="chunk_size is 24"):
        generalized_delta.chunked_delta(query, read, write, write_value, chunk_size=24)
