"""The elementwise recurrence and the running maximum: forms agree, segments and states count, nothing overflows."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from zoo.ops.recurrence import diagonal_scan
from zoo.ops.recurrence.hgrn import hgrn
from zoo.ops.recurrence.rg_lru import rg_lru
from zoo.ops.recurrence.rwkv4 import WKVState, rwkv4
from zoo.ops.recurrence.stabilizer import NO_HISTORY, stabilize

LENGTHS = [1, 7, 16, 17, 33]
BATCH, CHANNELS = 2, 3
FORMS = {
    "recurrent": diagonal_scan.recurrent_diagonal,
    "chunked": partial(diagonal_scan.chunked_diagonal, chunk_size=8),
}


def case(seq, seed, *, segments=True, strength=1.0):
    """Log decays, inputs, a first state and segments (all alike without `segments`)."""
    draw = np.random.default_rng(seed)
    shape = (BATCH, seq, CHANNELS)
    ids = np.cumsum(draw.random((BATCH, seq)) < 0.15 * segments, axis=1)
    numbers = (-strength * draw.random(shape), draw.normal(size=shape), draw.normal(size=(BATCH, CHANNELS)))
    return *(jnp.asarray(x, jnp.float32) for x in numbers), jnp.asarray(ids, jnp.int32)


@partial(jax.jit, static_argnums=0)
def with_gradients(op, *arguments):
    """Everything that an operation gives, and the gradients of a sum with fixed weights."""

    def loss(*arguments):
        results = op(*arguments)
        leaves = jax.tree.leaves(results)
        return sum((x * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)).sum() for x in leaves), results

    (_, results), gradients = jax.value_and_grad(loss, range(len(arguments)), has_aux=True)(*arguments)
    return results, gradients


def close(ours, theirs, tolerance=2e-6):
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance * max(1.0, float(np.abs(other).max())))


def linear(form, log_decay, x, state, ids):
    return FORMS[form](log_decay, x, state=state, segment_ids=ids)


def hgrn_of(form, log_decay, x, state, ids):
    return hgrn(x, log_decay, state=state, segment_ids=ids, mode=form)


def rg_lru_of(form, r, x, state, ids):
    return rg_lru(x, r, x[::-1], jnp.linspace(-3, 2, CHANNELS), state=state, segment_ids=ids, mode=form)


def rwkv4_of(form, k, v, state, ids):
    first = WKVState(state, 1 + jnp.abs(state), 3 * state)
    return rwkv4(9 * k, v, state[0], v[0, 0], state=first, segment_ids=ids, mode=form)


@pytest.fixture(scope="module")
def operations():
    """One function an operation and form, so that examples share what is compiled."""

    def make(op, form, ids):
        return lambda *numbers: op(form, *numbers, ids)

    compiled = {}
    for op in (linear, hgrn_of, rg_lru_of, rwkv4_of):
        for form in FORMS:
            compiled[op, form] = jax.jit(
                lambda decay, x, state, ids, op=op, form=form: with_gradients(make(op, form, ids), decay, x, state)
            )
    return compiled


@settings(max_examples=10)
@given(
    seq=st.sampled_from(LENGTHS),
    seed=st.integers(0, 99),
    segments=st.booleans(),
    strength=st.sampled_from([0.1, 2, 20, 1e4]),
)
def test_chunked_is_recurrent(operations, seq, seed, segments, strength):
    numbers = case(seq, seed, segments=segments, strength=strength)
    ours, theirs = (operations[linear, form](*numbers) for form in ("chunked", "recurrent"))
    close(ours, theirs)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(ours))


@settings(max_examples=3)
@given(seed=st.integers(0, 99), segments=st.booleans())
@pytest.mark.parametrize("op", [hgrn_of, rg_lru_of, rwkv4_of])
def test_forms_of_operations_agree(operations, op, seed, segments):
    numbers = case(33, seed, segments=segments)
    close(operations[op, "chunked"](*numbers), operations[op, "recurrent"](*numbers), 1e-5)


def test_recurrent_is_the_equation():
    log_decay, x, state, ids = case(17, 0)
    output, last = diagonal_scan.recurrent_diagonal(log_decay, x, state=state, segment_ids=ids)
    h = np.asarray(state, np.float64)
    for t in range(17):
        if t:
            h = np.where((ids[:, t] != ids[:, t - 1])[:, None], 0, h)
        h = np.exp(np.asarray(log_decay[:, t], np.float64)) * h + x[:, t]
        np.testing.assert_allclose(output[:, t], h, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(last, h, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_packed_is_separate(form):
    log_decay, x, _, _ = case(33, 3)
    ids = jnp.asarray([[0] * 10 + [1] * 23] * BATCH)
    packed, last = FORMS[form](log_decay, x, segment_ids=ids)
    first, _ = FORMS[form](log_decay[:, :10], x[:, :10])
    second, end = FORMS[form](log_decay[:, 10:], x[:, 10:])
    close((packed[:, :10], packed[:, 10:], last), (first, second, end))


@pytest.mark.parametrize("form", FORMS)
def test_a_state_goes_on(form):
    log_decay, x, _, _ = case(33, 4)
    whole, last = FORMS[form](log_decay, x)
    first, between = FORMS[form](log_decay[:, :16], x[:, :16])
    second, end = FORMS[form](log_decay[:, 16:], x[:, 16:], state=between)
    close((jnp.concatenate([first, second], 1), end), (whole, last))


@pytest.mark.parametrize("segments", [False, True])
def test_affine_is_what_a_stretch_does_and_composes(segments):
    log_decay, x, state, ids = case(33, 6, segments=segments)
    ids = ids.at[:, 16:].add(ids[:, 15:16] - ids[:, 16:17])  # none begins where the sequence is cut
    stretch = lambda part: diagonal_scan.affine_diagonal(
        log_decay[:, part], x[:, part], segment_ids=ids[:, part], chunk_size=8
    )
    (decay, own), (early_decay, early), (late_decay, late) = map(stretch, (slice(33), slice(16), slice(16, 33)))
    close((early_decay * late_decay, late_decay * early + late), (decay, own))
    _, last = diagonal_scan.recurrent_diagonal(log_decay, x, state=state, segment_ids=ids)
    close(decay * state + own, last)
    assert (decay == 0).any() == segments


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_float32_of_rounded_inputs_but_for_the_last_rounding(form):
    log_decay, x, state, ids = case(33, 7)
    low = x.astype(jnp.bfloat16)
    ours, last = FORMS[form](log_decay, low, state=state, segment_ids=ids)
    exact, end = diagonal_scan.recurrent_diagonal(log_decay, low.astype(jnp.float32), state=state, segment_ids=ids)
    assert ours.dtype == jnp.bfloat16 and last.dtype == jnp.float32
    np.testing.assert_allclose(ours.astype(jnp.float32), exact, rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(last, end, rtol=1e-5, atol=1e-6)


def test_features_may_be_several_dims_or_none():
    log_decay, x, state, _ = case(17, 8)
    several = lambda x: x[..., None] * jnp.ones(2)
    ours, last = FORMS["chunked"](several(log_decay), several(x), state=several(state))
    alone, end = FORMS["chunked"](log_decay[..., 0], x[..., 0], state=state[..., 0])
    theirs, _ = diagonal_scan.recurrent_diagonal(log_decay, x, state=state)
    close((ours[..., 1], alone, last[:, 0, 0]), (theirs, theirs[..., 0], end))


def test_the_backward_pass_keeps_factors_and_outputs_only():
    log_decay, x, state, _ = case(33, 9)
    run: Any = FORMS["chunked"]
    _, back = jax.vjp(lambda decay, x, state: run(decay, x, state=state)[0], log_decay, x, state)
    kept = sum(leaf.size for leaf in jax.tree.leaves(back) if hasattr(leaf, "size"))
    assert kept <= 3 * x.size + 4 * state.size


def test_split_over_a_mesh():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    log_decay, x, state, ids = case(17, 10)

    def loss(log_decay, x, factor, ids):
        output, _ = rg_lru(x * factor, log_decay, x, factor, segment_ids=ids)
        mixed, after = rwkv4(x, output, factor, factor, segment_ids=ids)
        return jax.lax.psum((mixed * output).sum() + (after.numerator / after.denominator).sum(), "data")

    rows, whole = PartitionSpec("data"), PartitionSpec()
    split = jax.shard_map(loss, mesh=mesh, in_specs=(rows, rows, whole, rows), out_specs=whole)
    alone = jax.shard_map(
        loss,
        mesh=jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1]),
        in_specs=(rows, rows, whole, rows),
        out_specs=whole,
    )
    gradients: Any = [jax.jit(jax.value_and_grad(f, (0, 1, 2))) for f in (split, alone)]
    results = [f(log_decay, x, state[0], ids) for f in gradients]
    close(*results, 1e-5)


def test_a_chunk_without_tokens_is_told():
    log_decay, x, _, _ = case(7, 0)
    with pytest.raises(ValueError, match="chunk is 0; a chunk has at least one token"):
        diagonal_scan.chunked_diagonal(log_decay, x, chunk_size=0)


def maxima(log_decay, log_input, state, ids):
    """`stabilize`, one token after another by `jnp.maximum`."""
    rows, previous = [], state
    for t in range(log_input.shape[1]):
        if t:
            previous = jnp.where((ids[:, t] != ids[:, t - 1])[:, None], NO_HISTORY, previous)
        known = previous > NO_HISTORY / 2
        reached = log_decay[:, t] + jnp.where(known, previous, 0)
        highest = jnp.where(known, jnp.maximum(reached, log_input[:, t]), log_input[:, t])
        rows.append((jnp.where(known, reached - highest, 0), log_input[:, t] - highest, highest))
        previous = highest
    return tuple(jnp.stack(column, 1) for column in zip(*rows, strict=True))


@settings(max_examples=6)
@given(seed=st.integers(0, 99), segments=st.booleans(), strength=st.sampled_from([0.1, 2, 20]), known=st.booleans())
def test_stabilize_is_the_running_maximum(seed, segments, strength, known):
    log_decay, log_input, state, ids = case(17, seed, segments=segments, strength=strength)
    state = state if known else jnp.full_like(state, NO_HISTORY)
    ours, theirs = (STABILIZED[f](log_decay, 3 * log_input, state, ids) for f in ("ours", "theirs"))
    close(ours, theirs, 5e-6)
    decay, log_input, _ = ours[0]
    assert (decay <= 1e-5).all() and (log_input <= 0).all()


STABILIZED = {
    "ours": jax.jit(
        lambda g, i, state, ids: with_gradients(lambda g, i, m: stabilize(g, i, state=m, segment_ids=ids), g, i, state)
    ),
    "theirs": jax.jit(lambda g, i, state, ids: with_gradients(lambda g, i, m: maxima(g, i, m, ids), g, i, state)),
}


def test_stabilize_over_several_chunks_and_without_a_state():
    log_decay, log_input, _, ids = case(150, 2)
    decay, entering, highest = (np.asarray(x) for x in stabilize(log_decay, log_input, segment_ids=ids))
    begins = np.concatenate([np.ones((BATCH, 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    for t in range(150):
        reached = np.where(begins[:, t, None], -np.inf, log_decay[:, t] + highest[:, t - 1])
        np.testing.assert_allclose(highest[:, t], np.maximum(reached, log_input[:, t]), rtol=1e-6)
        np.testing.assert_allclose(decay[:, t], np.where(np.isinf(reached), 0, reached - highest[:, t]), atol=1e-6)
    np.testing.assert_array_equal(entering, log_input - highest)


def test_stabilize_takes_inputs_of_minus_infinity():
    log_decay, log_input, _, _ = case(7, 3)
    log_input = log_input.at[:, :3].set(-jnp.inf)
    results, gradients = with_gradients(stabilize, log_decay, log_input)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((results, gradients)))
    np.testing.assert_array_equal(results[2][:, 3], log_input[:, 3])


def test_rg_lru_has_finite_gradients_where_nothing_decays():
    _, x, _, _ = case(7, 4)
    for param in (-200.0, -20.0, 200.0):  # a is one to the last digit, one but for a few, and zero
        results, gradients = with_gradients(rg_lru, x, x, x, jnp.full(CHANNELS, param))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((results, gradients)))


def test_rg_lru_takes_the_first_token_whole():
    _, x, state, _ = case(7, 5)
    param = jnp.zeros(CHANNELS)
    ids = jnp.asarray([[0, 0, 0, 1, 1, 1, 1]] * BATCH)
    output, _ = rg_lru(x, x, x, param, segment_ids=ids)
    np.testing.assert_allclose(output[:, [0, 3]], (jax.nn.sigmoid(x) * x)[:, [0, 3]], rtol=1e-5)
    going_on, _ = rg_lru(x, x, x, param, state=jnp.zeros_like(state))
    assert (np.abs(going_on[:, 0]) < np.abs(output[:, 0])).all()


def test_rwkv4_takes_keys_of_any_size():
    _, x, _, _ = case(33, 6)
    w, u = jnp.zeros(CHANNELS), jnp.ones(CHANNELS)
    results, gradients = with_gradients(rwkv4, 1000 * x, x, w, u)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((results, gradients)))
    assert (results[0] <= x.max(1, keepdims=True) + 1e-5).all() and (results[0] >= x.min(1, keepdims=True) - 1e-5).all()
    moved, _ = rwkv4(x + 1000, x, w, u)
    np.testing.assert_allclose(moved, rwkv4(x, x, w, u)[0], rtol=1e-3, atol=1e-4)
