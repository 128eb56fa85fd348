"""The diagonal scan and its instances: chunked equals recurrent, with segments, states and strong decays."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from tests.quick import mark_slow
from tests.recurrences import (
    BATCH,
    CHANNELS,
    assert_shards_equal_one_device,
    close,
    draw_diagonal,
    draw_documents,
    with_gradients,
)
from zoo.ops.recurrence import diagonal_scan
from zoo.ops.recurrence.hgrn import hgrn
from zoo.ops.recurrence.rg_lru import rg_lru
from zoo.ops.recurrence.rwkv4 import WKVState, rwkv4

LENGTHS = [1, 7, 16, 17, 33]
MODES = {
    "recurrent": diagonal_scan.recurrent_diagonal,
    "chunked": partial(diagonal_scan.chunked_diagonal, chunk_size=8),
}


def linear(mode, log_decay, x, state, ids):
    return MODES[mode](log_decay, x, state=state, segment_ids=ids)


def hgrn_of(mode, log_decay, x, state, ids):
    return hgrn(x, log_decay, state=state, segment_ids=ids, implementation=mode)


def rg_lru_of(mode, r, x, state, ids):
    return rg_lru(x, r, x[::-1], jnp.linspace(-3, 2, CHANNELS), state=state, segment_ids=ids, implementation=mode)


def rwkv4_of(mode, k, v, state, ids):
    first = WKVState(state, 1 + jnp.abs(state), 3 * state)
    return rwkv4(9 * k, v, state[0], v[0, 0], state=first, segment_ids=ids, implementation=mode)


@pytest.fixture(scope="module")
def operations():
    """One jitted function per operation and mode, so that examples share compiled programs."""

    def make(op, mode, ids):
        return lambda *numbers: op(mode, *numbers, ids)

    compiled = {}
    for op in (linear, hgrn_of, rg_lru_of, rwkv4_of):
        for mode in MODES:
            compiled[op, mode] = jax.jit(
                lambda decay, x, state, ids, op=op, mode=mode: with_gradients(make(op, mode, ids), decay, x, state)
            )
    return compiled


@pytest.mark.parametrize("seq", mark_slow(LENGTHS, but=[33]))
@settings(max_examples=6)
@given(
    seed=st.integers(0, 99),
    segments=st.booleans(),
    strength=st.sampled_from([0.1, 2, 20, 1e4]),
)
def test_chunked_diagonal_equals_recurrent(operations, seq, seed, segments, strength):
    numbers = draw_diagonal(seq, seed, segments=segments, strength=strength)
    ours, theirs = (operations[linear, mode](*numbers) for mode in ("chunked", "recurrent"))
    close(ours, theirs)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(ours))


@settings(max_examples=3)
@given(seed=st.integers(0, 99), segments=st.booleans())
@pytest.mark.parametrize("op", [hgrn_of, rg_lru_of, rwkv4_of])
def test_diagonal_ops_chunked_equals_recurrent(operations, op, seed, segments):
    numbers = draw_diagonal(33, seed, segments=segments)
    close(operations[op, "chunked"](*numbers), operations[op, "recurrent"](*numbers), 1e-5)


def test_recurrent_diagonal_equals_its_equation():
    log_decay, x, state, ids = draw_diagonal(17, 0)
    output, last = diagonal_scan.recurrent_diagonal(log_decay, x, state=state, segment_ids=ids)
    h = np.asarray(state, np.float64)
    for t in range(17):
        if t:
            h = np.where((ids[:, t] != ids[:, t - 1])[:, None], 0, h)
        h = np.exp(np.asarray(log_decay[:, t], np.float64)) * h + x[:, t]
        np.testing.assert_allclose(output[:, t], h, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(last, h, rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # by default chunked equals recurrent, and recurrent its equation, with segments and states
@pytest.mark.parametrize("mode", MODES)
def test_diagonal_scan_of_packed_sequences_equals_separate(mode):
    log_decay, x, _, _ = draw_diagonal(33, 3)
    ids = jnp.asarray([[0] * 10 + [1] * 23] * BATCH)
    packed, last = MODES[mode](log_decay, x, segment_ids=ids)
    first, _ = MODES[mode](log_decay[:, :10], x[:, :10])
    second, end = MODES[mode](log_decay[:, 10:], x[:, 10:])
    close((packed[:, :10], packed[:, 10:], last), (first, second, end))


@pytest.mark.slow  # as above
@pytest.mark.parametrize("mode", MODES)
def test_diagonal_scan_continues_from_a_state(mode):
    log_decay, x, _, _ = draw_diagonal(33, 4)
    whole, last = MODES[mode](log_decay, x)
    first, between = MODES[mode](log_decay[:, :16], x[:, :16])
    second, end = MODES[mode](log_decay[:, 16:], x[:, 16:], state=between)
    close((jnp.concatenate([first, second], 1), end), (whole, last))


def hgrn_on_shard(tokens, fixed, ids, state, fresh):
    return hgrn(*tokens, state=state, segment_ids=ids)


@pytest.mark.slow  # test_rg_lru_of_shards_equals_one_device has the scan by default
@settings(max_examples=6)
@given(seed=st.integers(0, 99), packed=st.booleans(), strength=st.sampled_from([0.1, 2, 1e4]))
def test_diagonal_scan_of_shards_equals_one_device(seed, packed, strength):
    log_decay, x, _, _ = draw_diagonal(40, seed, strength=strength)
    assert_shards_equal_one_device(hgrn_on_shard, (x, log_decay), (), draw_documents(40, seed, packed=packed))


@pytest.mark.parametrize("mode", mark_slow(MODES, but=["chunked"]))
def test_diagonal_scan_of_bfloat16_computes_in_float32(mode):
    log_decay, x, state, ids = draw_diagonal(33, 7)
    low = x.astype(jnp.bfloat16)
    ours, last = MODES[mode](log_decay, low, state=state, segment_ids=ids)
    exact, end = diagonal_scan.recurrent_diagonal(log_decay, low.astype(jnp.float32), state=state, segment_ids=ids)
    assert ours.dtype == jnp.bfloat16 and last.dtype == jnp.float32
    np.testing.assert_allclose(ours.astype(jnp.float32), exact, rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(last, end, rtol=1e-5, atol=1e-6)


def test_diagonal_scan_of_any_feature_dims():
    log_decay, x, state, _ = draw_diagonal(17, 8)
    several = lambda x: x[..., None] * jnp.ones(2)
    ours, last = jax.jit(MODES["chunked"])(several(log_decay), several(x), state=several(state))
    alone, end = jax.jit(MODES["chunked"])(log_decay[..., 0], x[..., 0], state=state[..., 0])
    theirs, _ = jax.jit(MODES["recurrent"])(log_decay, x, state=state)
    close((ours[..., 1], alone, last[:, 0, 0]), (theirs, theirs[..., 0], end))


def test_chunked_diagonal_saves_factors_and_outputs_alone():
    log_decay, x, state, _ = draw_diagonal(33, 9)
    run: Any = MODES["chunked"]
    _, back = jax.vjp(lambda decay, x, state: run(decay, x, state=state)[0], log_decay, x, state)
    kept = sum(leaf.size for leaf in jax.tree.leaves(back) if hasattr(leaf, "size"))
    assert kept <= 3 * x.size + 4 * state.size


@pytest.mark.slow
def test_diagonal_ops_on_a_mesh_equal_one_device():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    log_decay, x, state, ids = draw_diagonal(17, 10)

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


def test_chunked_diagonal_raises_for_chunk_size_zero():
    log_decay, x, _, _ = draw_diagonal(7, 0)
    with pytest.raises(ValueError, match="chunk_size is 0; a chunk has at least one token"):
        diagonal_scan.chunked_diagonal(log_decay, x, chunk_size=0)
