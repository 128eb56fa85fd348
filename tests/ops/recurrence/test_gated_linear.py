"""Gated linear attention: chunked equals recurrent, in values and gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recurrences import BATCH, KEY_DIM, draw_gated, far
from zoo.ops.recurrence.gated_linear import chunked_gated_linear, recurrent_gated_linear

CHUNK = 16
SEGMENTS = {"one": lambda t: 0 * t, "several": lambda t: t // 6, "each token": lambda t: t}


@partial(jax.jit, static_argnames="run_mode")
def with_gradients(run_mode, parts, bonus, segments, cotangents):
    def run(parts, bonus):
        query, key, value, decay, state = parts
        options = {} if run_mode is recurrent_gated_linear else {"chunk_size": CHUNK}
        return run_mode(query, key, value, decay, bonus=bonus, state=state, segment_ids=segments, scale=0.5, **options)

    out, back = jax.vjp(run, parts, bonus)
    return out, back(cotangents)


@pytest.mark.slow  # two kinds are in the next test
@settings(max_examples=8)
@given(
    seq=st.sampled_from([1, 15, 33]),
    kind=st.sampled_from(["none", "number", "vector", "bonus"]),
    segments=st.sampled_from(sorted(SEGMENTS)),
    strength=st.sampled_from([1.0, 20.0]),
    seed=st.integers(0, 99),
)
def test_chunked_gated_linear_of_any_kind_equals_recurrent(seq, kind, segments, strength, seed):
    check_chunked_equals_recurrent(seq, kind, segments, strength, seed)


@pytest.mark.one_case
@pytest.mark.parametrize("kind", ["number", "bonus"])
def test_chunked_gated_linear_equals_recurrent_with_gradients(kind):
    for segments, strength, seed in (("one", 1.0, 0), ("several", 20.0, 1), ("each token", 1.0, 2)):
        check_chunked_equals_recurrent(33, kind, segments, strength, seed)


def check_chunked_equals_recurrent(seq, kind, segments, strength, seed):
    parts = draw_gated(seq, "vector" if kind == "bonus" else kind, seed=seed, strength=strength)
    bonus = jnp.asarray(np.random.default_rng(seed).normal(size=(2, KEY_DIM)), jnp.float32) if kind == "bonus" else None
    ids = jnp.broadcast_to(SEGMENTS[segments](jnp.arange(seq)), (BATCH, seq))
    cotangents = draw_gated(seq, "number", seed=seed + 1)[2], draw_gated(seq, "number", seed=seed + 2)[4]
    out, gradients = with_gradients(recurrent_gated_linear, parts, bonus, ids, cotangents)
    fast, fast_gradients = with_gradients(chunked_gated_linear, parts, bonus, ids, cotangents)
    for a, b in zip(jax.tree.leaves((fast, fast_gradients)), jax.tree.leaves((out, gradients)), strict=True):
        assert far(a, b) < 2e-5


def test_recurrent_gated_linear_equals_its_equation():
    query, key, value, decay, state = (np.asarray(x) for x in draw_gated(5, "vector"))
    bonus = np.random.default_rng(1).normal(size=(2, KEY_DIM)).astype(np.float32)
    plain, with_bonus, s = [], [], state
    for t in range(5):
        new = key[:, t, :, :, None] * value[:, t, :, None]
        with_bonus.append(np.einsum("bhk,bhkv->bhv", query[:, t], s + bonus[..., None] * new))
        s = np.exp(decay[:, t])[..., None] * s + new
        plain.append(np.einsum("bhk,bhkv->bhv", query[:, t], s))
    for expected, u in ((plain, None), (with_bonus, jnp.asarray(bonus))):
        output, after = recurrent_gated_linear(
            *map(jnp.asarray, (query, key, value, decay)), bonus=u, state=jnp.asarray(state)
        )
        assert far(output, np.stack(expected, 1)) < 1e-6 and far(after, s) < 1e-6


@pytest.mark.parametrize("kind", [pytest.param("none", marks=pytest.mark.slow), "number"])
def test_gated_linear_of_shared_keys_equals_repeated_keys(kind):
    query, key, value, decay, state = draw_gated(21, kind, heads=6, groups=2)
    repeated = [jnp.repeat(x, 3, axis=2) for x in (query, key)]
    for run_mode in (recurrent_gated_linear, partial(chunked_gated_linear, chunk_size=CHUNK)):
        run = jax.jit(lambda *keys, run_mode=run_mode: run_mode(*keys, value, decay, state=state))
        shared, apart = run(query, key), run(*repeated)
        assert all(far(a, b) < 1e-6 for a, b in zip(shared, apart, strict=True))


def test_chunked_gated_linear_of_a_bonus_and_one_decay_per_head():
    query, key, value, decay, state = draw_gated(21, "number")
    run = lambda run_mode: run_mode(query, key, value, decay, bonus=jnp.ones((2, KEY_DIM)), state=state)
    expected, found = jax.jit(
        lambda: (run(recurrent_gated_linear), run(partial(chunked_gated_linear, chunk_size=CHUNK)))
    )()
    assert all(far(a, b) < 1e-6 for a, b in zip(found, expected, strict=True))


def test_gated_linear_raises_for_mismatched_heads():
    query, key, value, decay, _ = draw_gated(3, "vector", heads=4, groups=2)
    with pytest.raises(ValueError, match="4 heads of values share 2 heads of keys, whose decays are vectors"):
        chunked_gated_linear(query, key, value, decay)
    with pytest.raises(ValueError, match="3 heads of values do not divide evenly over 2 heads"):
        recurrent_gated_linear(query, key, value[:, :, :3])


def test_chunked_gated_linear_of_strong_decays_is_finite():
    """Log decays of -20 per step and below, in one chunk with mild ones: neither inf nor NaN, forward or backward."""
    for strength in (20.0, 1e4):
        for kind in ("number", "vector"):
            parts = draw_gated(33, kind, strength=strength)
            cotangents = parts[2], parts[4]
            out = with_gradients(chunked_gated_linear, parts, None, jnp.zeros((BATCH, 33), jnp.int32), cotangents)
            assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(out))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["number", "vector"])
def test_chunked_gated_linear_of_bfloat16(kind):
    """Bound: bfloat16 rounds by 2 ** -8; sums of dozens of such terms stay within four times that."""
    query, key, value, decay, state = draw_gated(33, kind)
    low = [x.astype(jnp.bfloat16) for x in (query, key, value)]
    exact = recurrent_gated_linear(*(x.astype(jnp.float32) for x in low), decay, state=state)
    output, after = chunked_gated_linear(*low, decay, state=state, chunk_size=CHUNK)
    assert output.dtype == jnp.bfloat16 and after.dtype == jnp.float32
    assert far(output.astype(jnp.float32), exact[0]) < 2**-6 and far(after, exact[1]) < 2**-6
