"""Mamba-3 of one and of several inputs and outputs equals its equations; states, shards, angles and padding."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recurrences import BATCH, all_close, assert_shards_equal_one_device, close, draw_documents
from zoo.ops.recurrence import mamba3 as op
from zoo.ops.recurrence.mamba3 import Mamba3State, mamba3, mamba3_reference

HEADS, STATE, HEAD_DIM, ANGLES = 2, 5, 3, 2
MODES = ("recurrent", "chunked")
SEGMENTS = {"one": lambda t: 0 * t, "several": lambda t: t // 6, "each token": lambda t: t}


def draw_mamba3(seq, rank, seed=0, strength=1.0, dtype=jnp.float32):
    """Random operands, D and state; half of the decays are `strength` strong. Angles reach several turns per token."""
    draw = np.random.default_rng(seed)
    normal = lambda *dims: jnp.asarray(draw.normal(size=(BATCH, *dims)), jnp.float32)
    each = partial(normal, seq)
    rows = lambda size: each(rank, HEADS, size).astype(dtype)
    decay = -jnp.abs(each(HEADS)) * jnp.asarray(draw.choice([0.01, strength], (BATCH, seq, HEADS)), jnp.float32)
    tokens = (
        *(rows(HEAD_DIM), jax.nn.softplus(each(HEADS)), decay, jax.nn.sigmoid(each(HEADS))),
        *(3 * each(HEADS, ANGLES), rows(STATE), rows(STATE)),
    )
    state = Mamba3State(
        normal(HEADS, STATE, HEAD_DIM),
        normal(rank, HEADS, STATE),
        normal(rank, HEADS, HEAD_DIM),
        jnp.asarray(draw.uniform(-0.5, 0.5, (BATCH, HEADS, ANGLES)), jnp.float32),
    )
    return tokens, normal(HEADS)[0], state


def empty_state(state):
    return jax.tree.map(jnp.zeros_like, state)


def run_reference(tokens, D, state, ids):
    """Compute each segment by itself; the first one continues the state. Rows have the same segments."""
    outputs, last = [], state
    for segment in np.unique(ids):
        own = np.flatnonzero(ids == segment)
        y, last = mamba3_reference(*(x[:, own[0] : own[-1] + 1] for x in tokens), D, state=last)
        outputs.append(y)
        if segment != ids[-1]:
            last = empty_state(state)
    return jnp.concatenate(outputs, 1), last


@partial(jax.jit, static_argnums=(0, 4))
def with_gradients(mode, operands, ids, cotangents, segments=()):
    """Compute outputs, state and gradients; with `segments`, by the reference of each."""

    def run(operands):
        if segments:
            return run_reference(*operands, np.array(segments))
        tokens, D, state = operands
        return mamba3(*tokens, D, state=state, segment_ids=ids, implementation=mode)

    results, back = jax.vjp(run, operands)
    return results, back(cotangents)[0]


def check_equals_reference(seq, rank, segments, strength, seed, modes=MODES):
    operands = draw_mamba3(seq, rank, seed, strength)
    row = SEGMENTS[segments](np.arange(seq))
    (y, *_), _, state = draw_mamba3(seq, rank, seed + 1)
    expected, expected_gradients = with_gradients("reference", operands, None, (y, state), tuple(row.tolist()))
    for mode in modes:
        found, gradients = with_gradients(mode, operands, jnp.broadcast_to(row, (BATCH, seq)), (y, state))
        all_close(found, expected, 1e-5)
        all_close(gradients, expected_gradients, 5e-5)


@pytest.mark.one_case
def test_mamba3_equals_its_equations_with_gradients():
    """Several segments of two inputs and outputs per token."""
    check_equals_reference(15, 2, "several", 20.0, 0)


@pytest.mark.slow
@settings(max_examples=8)
@given(
    seq=st.sampled_from([1, 9, 33]),
    rank=st.sampled_from([1, 3]),
    segments=st.sampled_from(sorted(SEGMENTS)),
    strength=st.sampled_from([0.1, 20.0]),
    seed=st.integers(0, 99),
)
def test_mamba3_of_any_case_equals_its_equations(seq, rank, segments, strength, seed):
    check_equals_reference(seq, rank, segments, strength, seed)


@pytest.mark.one_case
def test_mamba3_of_a_rank_is_a_sum_over_inputs_and_outputs():
    """Each output reads what each input writes by itself; a rank of 1 may be left out of the shapes."""
    (x, dt, decay, trapezoid, angle, B, C), D, _ = draw_mamba3(33, 3)
    run = jax.jit(lambda x, B, C, D=None: mamba3(x, dt, decay, trapezoid, angle, B, C, D))
    y, state = run(x, B, C, D)
    parts = [[run(x[:, :, r], B[:, :, r], C[:, :, R]) for r in range(3)] for R in range(3)]
    expected = jnp.stack([sum(y for y, _ in row) for row in parts], axis=2) + D[:, None] * x
    all_close(y, expected, 1e-5)
    all_close(state.ssm_state, sum(last.ssm_state for _, last in parts[0]), 1e-5)
    with_rank = run(x[:, :, :1], B[:, :, :1], C[:, :, :1])
    all_close((with_rank[0][:, :, 0], with_rank[1]), parts[0][0], 1e-6)


def mamba3_on_shard(tokens, fixed, ids, state, fresh):
    return mamba3(*tokens, fixed, state=state, segment_ids=ids)


@settings(max_examples=4)
@given(seed=st.integers(0, 99), packed=st.booleans(), strength=st.sampled_from([0.1, 20]))
def test_mamba3_of_shards_equals_one_device(seed, packed, strength):
    """A token's late part is written on the next device, unless a document begins there."""
    tokens, D, _ = draw_mamba3(24, 2, seed, strength)
    assert_shards_equal_one_device(mamba3_on_shard, tokens, D, draw_documents(24, seed, packed=packed), 2e-5)


def test_mamba3_maps_compose_in_any_grouping():
    def make(seed):
        _, _, state = draw_mamba3(1, 2, seed)
        draw = np.random.default_rng(seed)
        decay, late = (jnp.asarray(draw.uniform(size=(BATCH, HEADS, *dims)), jnp.float32) for dims in ((1, 1), ()))
        keeps = jnp.ones((BATCH, 1, 1))
        return op._Mamba3Map(decay, late, state), op._TurnMap(keeps, state.turns)

    _, _, state = draw_mamba3(1, 2, 4)
    for first, second, third, before in zip(make(0), make(1), make(2), (state, state.turns), strict=True):
        joined = first.then(second).then(third)
        all_close(joined, first.then(second.then(third)), 1e-6)
        all_close(joined.apply(before), third.apply(second.apply(first.apply(before))), 1e-6)
        after = first.then(second.reset(jnp.array([True, False]))).apply(before)
        all_close(jax.tree.map(lambda x: x[0], after), jax.tree.map(lambda x: x[0], second.offset), 1e-6)


@pytest.mark.parametrize("strength", [20.0, 1e4])
def test_mamba3_of_strong_decays_is_finite(strength):
    operands = draw_mamba3(33, 1, strength=strength)
    ids = jnp.zeros((BATCH, 33), jnp.int32)
    found = with_gradients("chunked", operands, ids, (operands[0][0], operands[2]))
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(found))


@pytest.mark.ci
@pytest.mark.parametrize("rank", [1, 2])
def test_mamba3_of_bfloat16_is_near_float32(rank):
    tokens, D, state = draw_mamba3(33, rank, dtype=jnp.bfloat16)
    run = jax.jit(lambda *tokens: mamba3(*tokens, D, state=state))
    y, last = run(*tokens)
    expected, expected_last = run(*(x.astype(jnp.float32) for x in tokens))
    assert y.dtype == jnp.bfloat16 and {x.dtype for x in last} == {jnp.dtype("float32")}
    all_close((y, last), (expected, expected_last), 2e-2)


def test_mamba3_angles_of_a_long_text_are_accurate():
    """65,536 tokens of about a third of a turn each. A sum of radians in float32 is off by 0.9."""
    step = jnp.asarray(0.34 + 0.01 * np.random.default_rng(0).normal(size=(1, 2**16, 1, 1)), jnp.float32)
    turns = jax.jit(lambda step: op._sum_turns(step, None).offset)(step)
    exact = np.asarray(step, np.float64).cumsum(1)
    error = np.asarray(turns, np.float64) - exact
    assert np.abs(error - np.round(error)).max() < 1e-5  # turns: 256 roundings of 3e-8, as random ones add up
    radians = (2 * np.pi * np.asarray(step)).astype(np.float32).cumsum(1)
    assert np.abs(radians - 2 * np.pi * exact).max() > 0.5


def test_mamba3_padding_leaves_the_state():
    """A row's padding lies between its state and its tokens: the first of them writes the late part of the state's."""
    tokens, D, state = draw_mamba3(6, 2)
    mask = jnp.array([[False] * 2 + [True] * 4, [True] * 6])
    run = jax.jit(lambda tokens, state, mask=None: mamba3(*tokens, D, state=state, token_mask=mask))
    y, last = run(tokens, state, mask)
    row = lambda tree: jax.tree.map(lambda x: x[:1], tree)
    expected, expected_last = run([x[:1, 2:] for x in tokens], row(state))
    close((y[:1, 2:], row(last)), (expected, expected_last))
    _, unchanged = run(tokens, state, jnp.zeros((BATCH, 6), bool))
    close(unchanged, state)
    y, _ = run(tokens, state, mask[:, ::-1])
    assert bool(jnp.isnan(y[0]).all()) and bool(jnp.isfinite(y[1]).all())


def test_mamba3_refuses_more_angles_than_pairs():
    (x, dt, decay, trapezoid, _, B, C), _, _ = draw_mamba3(3, 1)
    with pytest.raises(ValueError, match="mamba3: 3 angles turn pairs, and there are 5 states"):
        mamba3(x, dt, decay, trapezoid, jnp.zeros((BATCH, 3, HEADS, 3)), B, C)
