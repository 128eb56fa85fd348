"""MesaNet: both modes against a direct solution per token, with gradients; conjugate gradients; hard systems."""

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
from zoo.ops.recurrence.mesa_net import chunked_mesa_net, mesa_net, mesa_net_reference, recurrent_mesa_net

STEPS = 30
MODES = {
    "reference": mesa_net_reference,
    "recurrent": partial(recurrent_mesa_net, steps=STEPS),
    "chunked": partial(chunked_mesa_net, steps=STEPS, chunk_size=16),
}


def draw(seq, seed=0, strength=1.0):
    """Random queries, keys of length one, values, decays, betas, lambdas and a state with a positive definite R."""
    delta = draw_delta(seq, "number", 1, seed, strength)
    draw = np.random.default_rng(seed)
    beta = jnp.asarray(draw.uniform(size=(BATCH, seq, HEADS)), jnp.float32)
    regularization = jnp.asarray(draw.uniform(0.25, 1.25, (HEADS, KEY_DIM)), jnp.float32)
    root = jnp.asarray(draw.normal(size=(BATCH, HEADS, KEY_DIM, KEY_DIM)), jnp.float32)
    state = jnp.concatenate([root @ root.mT / KEY_DIM, delta["state"]], axis=-1)
    return (*(delta[name] for name in ("query", "key", "value", "log_decay")), beta, regularization), state


def call(mode, *operands_and_state):
    *operands, state = operands_and_state
    return MODES[mode](*operands, state=state)


CALLS = {mode: partial(call, mode) for mode in MODES}


@partial(jax.jit, static_argnums=0)
def jitted(mode, operands, state, segment_ids=None):
    return MODES[mode](*operands, state=state, segment_ids=segment_ids)


def check_direct_solution(seq, strength=1.0, seed=0):
    operands, state = draw(seq, seed, strength)
    expected = with_gradients(CALLS["reference"], *operands, state)
    for mode in ("recurrent", "chunked"):
        results, gradients = with_gradients(CALLS[mode], *operands, state)
        all_close(results, expected[0], 2e-5)
        all_close(gradients, expected[1], 1e-4)


def test_mesa_net_equals_a_direct_solution_with_gradients():
    check_direct_solution(21)


@pytest.mark.slow
@settings(max_examples=6)
@given(seq=st.sampled_from([1, 7, 70]), strength=st.sampled_from([0.1, 20.0]), seed=st.integers(0, 99))
def test_mesa_net_of_any_length_equals_a_direct_solution(seq, strength, seed):
    check_direct_solution(seq, strength, seed)


def test_mesa_net_minimizes_the_squared_error_of_all_tokens():
    """Against ridge regression from keys to values in numpy, without a state."""
    (query, key, value, log_decay, beta, regularization), _ = draw(9)
    output, _ = mesa_net(query, key, value, log_decay, beta, regularization, implementation="recurrent")
    q, k, v, g, weight, penalty = (
        np.asarray(x, np.float64) for x in (query, key, value, log_decay, beta, regularization)
    )
    for b, t, h in np.ndindex(BATCH, 9, HEADS):
        root = np.sqrt(weight[b, : t + 1, h] * np.exp([g[b, i + 1 : t + 1, h].sum() for i in range(t + 1)]))[:, None]
        rows = np.concatenate([root * k[b, : t + 1, h], np.diag(np.sqrt(penalty[h]))])
        targets = np.concatenate([root * v[b, : t + 1, h], np.zeros((KEY_DIM, VALUE_DIM))])
        fitted = np.linalg.lstsq(rows, targets, rcond=None)[0]
        np.testing.assert_allclose(output[b, t, h], q[b, t, h] @ fitted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@settings(max_examples=6)
@given(strength=st.sampled_from([0.1, 20.0]), seed=st.integers(0, 99))
def test_packed_documents_equal_documents_by_themselves(strength, seed):
    operands, state = draw(33, seed, strength)
    ids = jnp.broadcast_to(jnp.arange(33) >= 20, (BATCH, 33)).astype(jnp.int32)
    cut = lambda tokens: [*(x[:, tokens] for x in operands[:5]), operands[5]]
    for mode in ("recurrent", "chunked"):
        output, last = jitted(mode, operands, state, ids)
        first, _ = jitted(mode, cut(slice(0, 20)), state)
        second, expected = jitted(mode, cut(slice(20, 33)), jnp.zeros_like(state))
        all_close((output, last), (jnp.concatenate([first, second], 1), expected), 2e-5)


@pytest.mark.slow
def test_mesa_net_of_bfloat16():
    operands, state = draw(33, seed=3)
    low = [*(x.astype(jnp.bfloat16) for x in operands[:3]), *operands[3:]]
    expected = jitted("recurrent", [x.astype(jnp.float32) for x in low], state)
    for mode in ("recurrent", "chunked"):
        output, last = jitted(mode, low, state)
        assert output.dtype == jnp.bfloat16 and last.dtype == jnp.float32
        all_close((output, last), expected, 2**-8)


def test_mesa_net_of_strong_decays_and_zero_queries_is_finite():
    operands, state = draw(33, seed=2)
    query, key, value, log_decay, *rest = operands
    query = query.at[:, ::3].set(0)
    for decay in (log_decay, jnp.full_like(log_decay, -20.0), jnp.full_like(log_decay, -1e4)):
        found = with_gradients(CALLS["chunked"], query, key, value, decay, *rest, state)
        assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(found))


@pytest.mark.slow
def test_more_steps_solve_ill_conditioned_systems():
    """Equal keys without decay: the largest eigenvalue grows with the tokens. The error falls with the steps."""
    (query, key, value, log_decay, beta, regularization), state = draw(70)
    key = (key[:, :1] + 0.1 * key) / 1.1
    operands = (query, key, value, 0 * log_decay, 0 * beta + 1, 0 * regularization + 0.25)
    expected, _ = mesa_net_reference(*operands, state=state)
    errors = []
    for steps in (1, 2, STEPS):
        output, _ = mesa_net(*operands, state=state, steps=steps, implementation="chunked")
        errors.append(float(jnp.abs(output - expected).max() / jnp.abs(expected).max()))
    assert errors[0] > 2 * errors[1] > 100 * errors[2] and errors[2] < 1e-4


def test_mesa_net_keeps_nan_and_small_queries():
    operands, state = draw(5)
    query, *rest = operands
    expected, _ = jitted("chunked", operands, state)
    output, _ = jitted("chunked", (1e-25 * query, *rest), state)
    all_close(1e25 * output, expected, 1e-5)
    output, _ = jitted("chunked", (query.at[0, 3].set(jnp.nan), *rest), state)
    assert bool(jnp.isnan(output[0, 3]).all()) and bool(jnp.isfinite(output[1]).all())


def test_mesa_net_refuses_no_steps():
    operands, state = draw(5)
    with pytest.raises(ValueError, match="0 steps of conjugate gradients solve nothing; the default is 30"):
        mesa_net(*operands, state=state, steps=0)


def test_chunked_mesa_net_does_not_save_all_states():
    """Neither R of each token, nor the iterations, are residuals of the gradient."""
    seq, width = 256, 64
    shapes = [(1, seq, 1, width)] * 3 + [(1, seq, 1)] * 2 + [(1, width)]
    loss = lambda *x: (chunked_mesa_net(*x, steps=STEPS, chunk_size=32)[0] ** 2).sum()
    program = jax.jit(jax.grad(loss, range(6))).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    assert program.compile().memory_analysis().temp_size_in_bytes < seq * width * width * 4


def mesa_net_on_shard(tokens, fixed, ids, state, fresh):
    return mesa_net(*tokens, *fixed, state=state, segment_ids=ids)


@jax.jit
def mesa_net_in_pieces(operands, ids):
    *tokens, regularization = operands
    run = lambda piece, ids, state: mesa_net(*piece, regularization, state=state, segment_ids=ids)
    pieces = zip(*(jnp.split(x, (5, 16, 17), axis=1) for x in tokens), strict=True)
    return run_in_pieces(run, pieces, jnp.split(ids, (5, 16, 17), axis=1))


@pytest.mark.slow
@settings(max_examples=6)
@given(often=st.sampled_from([0.0, 0.1, 0.6]), strength=st.sampled_from([0.1, 20.0, 1e4]), seed=st.integers(0, 99))
def test_pieces_of_mesa_net_equal_the_whole(often, strength, seed):
    operands, state = draw(33, seed, strength)
    ids = jnp.asarray((np.random.default_rng(seed).random((BATCH, 33)) < often).cumsum(1))
    expected = jitted("recurrent", operands, jnp.zeros_like(state), ids)
    all_close(mesa_net_in_pieces(operands, ids), expected, 2e-5)


@pytest.mark.slow
@settings(max_examples=4)
@given(seed=st.integers(0, 99), packed=st.booleans(), strength=st.sampled_from([0.1, 20.0]))
def test_mesa_net_of_shards_equals_one_device(seed, packed, strength):
    (*tokens, regularization), _ = draw(40, seed, strength)
    ids = draw_documents(40, seed, packed=packed)
    assert_shards_equal_one_device(mesa_net_on_shard, tuple(tokens), (regularization,), ids, 2e-5)
