"""Gated DeltaNet-2 and Comba against their papers' equations, and against the delta rules that they contain."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recurrences import (
    BATCH,
    HEADS,
    KEY_DIM,
    VALUE_DIM,
    all_close,
    assert_shards_equal_one_device,
    draw_delta,
    draw_documents,
    run_in_pieces,
    with_gradients,
)
from zoo.ops.recurrence.decoupled_delta import comba, comba_reference, gdn2, gdn2_reference
from zoo.ops.recurrence.delta_rule import gated_delta_rule, kda

REFERENCES = {gdn2: gdn2_reference, comba: comba_reference}


def draw(op, seq, seed=0, strength=1.0):
    """Random operands of an operation, and its initial state: gates in (0, 2) and (0, 1), a read key below the key."""
    delta = draw_delta(seq, "vector" if op is gdn2 else "number", 1, seed, strength)
    uniform = lambda *dims: jnp.asarray(np.random.default_rng(seed).uniform(size=(BATCH, seq, HEADS, *dims)), "f4")
    query, key, value, log_decay, state = (delta[name] for name in ("query", "key", "value", "log_decay", "state"))
    if op is gdn2:
        return (query, key, value, log_decay, 2 * uniform(KEY_DIM), uniform(VALUE_DIM)), state
    return (query, key, value, 0.7 * key, uniform(), log_decay), state


@partial(jax.jit, static_argnums=(0, 1))
def run(op, mode, operands, state, segment_ids=None):
    return op(*operands, state=state, segment_ids=segment_ids, implementation=mode)


def call(op, mode, *operands_and_state):
    *operands, state = operands_and_state
    return op(*operands, state=state) if mode is None else op(*operands, state=state, implementation=mode)


CALLS = {
    (op, mode): partial(call, REFERENCES[op] if mode is None else op, mode)
    for op in REFERENCES
    for mode in (None, "recurrent", "chunked")
}


def check_references(op, seq, strength=1.0, seed=0):
    operands, state = draw(op, seq, seed, strength)
    expected = with_gradients(CALLS[op, None], *operands, state)
    for mode in ("recurrent", "chunked"):
        results, gradients = with_gradients(CALLS[op, mode], *operands, state)
        all_close(results, expected[0], 2e-5)
        all_close(gradients, expected[1], 1e-4)


@pytest.mark.one_case
@pytest.mark.parametrize("op", REFERENCES, ids=lambda op: op.__name__)
def test_decoupled_deltas_equal_their_references_with_gradients(op):
    check_references(op, 21)


@pytest.mark.slow
@settings(max_examples=6)
@given(
    op=st.sampled_from([*REFERENCES]),
    seq=st.sampled_from([1, 7, 70]),
    strength=st.sampled_from([0.1, 20.0]),
    seed=st.integers(0, 99),
)
def test_decoupled_deltas_of_any_length_equal_their_references(op, seq, strength, seed):
    check_references(op, seq, strength, seed)


def test_gates_that_are_equal_give_the_delta_rules():
    (query, key, value, log_decay, erase, _), state = draw(gdn2, 21)
    beta = erase[..., 0]
    gates = (jnp.broadcast_to(beta[..., None], x.shape) for x in (key, value))
    expected = kda(query, key, value, beta, log_decay, state=state, implementation="recurrent")
    all_close(run(gdn2, "recurrent", (query, key, value, log_decay, *gates), state), expected, 2e-6)
    (query, key, value, _, beta, log_decay), state = draw(comba, 21)
    expected = gated_delta_rule(query, key, value, beta, log_decay, state=state, implementation="recurrent")
    after_decay = partial(comba, read_before_decay=False)
    all_close(run(after_decay, "recurrent", (query, key, value, key, beta, log_decay), state), expected, 2e-6)


@pytest.mark.slow
@settings(max_examples=6)
@given(op=st.sampled_from([*REFERENCES]), strength=st.sampled_from([0.1, 20.0]), seed=st.integers(0, 99))
def test_packed_documents_equal_documents_by_themselves(op, strength, seed):
    operands, state = draw(op, 33, seed, strength)
    ids = jnp.broadcast_to(jnp.arange(33) >= 20, (BATCH, 33)).astype(jnp.int32)
    for mode in ("recurrent", "chunked"):
        output, last = run(op, mode, operands, state, ids)
        first, _ = run(op, mode, [x[:, :20] for x in operands], state)
        second, expected = run(op, mode, [x[:, 20:] for x in operands], jnp.zeros_like(state))
        all_close((output, last), (jnp.concatenate([first, second], 1), expected), 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("op", REFERENCES, ids=lambda op: op.__name__)
def test_decoupled_deltas_of_bfloat16(op):
    operands, state = draw(op, 33, seed=3)
    low = [x.astype(jnp.bfloat16) for x in operands]
    expected = run(op, "recurrent", [x.astype(jnp.float32) for x in low], state)
    for mode in ("recurrent", "chunked"):
        output, last = run(op, mode, low, state)
        assert output.dtype == jnp.bfloat16 and last.dtype == jnp.float32
        all_close((output, last), expected, 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("op", REFERENCES, ids=lambda op: op.__name__)
@pytest.mark.parametrize("strength", [20.0, 1e4])
def test_decoupled_deltas_of_strong_decays_are_finite(op, strength):
    operands, state = draw(op, 33, seed=2, strength=strength)
    found = with_gradients(CALLS[op, "chunked"], *operands, state)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(found))


def gdn2_on_shard(tokens, fixed, ids, state, fresh):
    return gdn2(*tokens, state=state, segment_ids=ids)


def comba_on_shard(tokens, fixed, ids, state, fresh):
    return comba(*tokens, state=state, segment_ids=ids)


@partial(jax.jit, static_argnums=0)
def run_op_in_pieces(op, operands, ids):
    on_piece = lambda piece, ids, state: op(*piece, state=state, segment_ids=ids, implementation="chunked")
    pieces = zip(*(jnp.split(x, (5, 16, 17), axis=1) for x in operands), strict=True)
    return run_in_pieces(on_piece, pieces, jnp.split(ids, (5, 16, 17), axis=1))


@pytest.mark.slow
@settings(max_examples=6)
@given(
    op=st.sampled_from([*REFERENCES]),
    often=st.sampled_from([0.0, 0.1, 0.6]),
    strength=st.sampled_from([0.1, 20.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_pieces_of_decoupled_deltas_equal_the_whole(op, often, strength, seed):
    operands, state = draw(op, 33, seed, strength)
    ids = jnp.asarray((np.random.default_rng(seed).random((BATCH, 33)) < often).cumsum(1))
    expected = run(op, "recurrent", operands, jnp.zeros_like(state), ids)
    all_close(run_op_in_pieces(op, operands, ids), expected, 2e-5)


@pytest.mark.slow
@settings(max_examples=4)
@given(seed=st.integers(0, 99), packed=st.booleans(), strength=st.sampled_from([0.1, 20.0]))
def test_decoupled_deltas_of_shards_equal_one_device(seed, packed, strength):
    for op, on_shard in ((gdn2, gdn2_on_shard), (comba, comba_on_shard)):
        tokens, _ = draw(op, 40, seed, strength)
        assert_shards_equal_one_device(on_shard, tokens, (), draw_documents(40, seed, packed=packed), 2e-5)
