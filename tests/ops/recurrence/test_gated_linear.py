"""Gated linear recurrences: products over chunks agree with one token after another."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.ops.recurrence import gated_linear
from zoo.ops.recurrence.chunks import decayed_product, exp_segsum
from zoo.ops.recurrence.gated_linear import affine_gated_linear, chunked_gated_linear, recurrent_gated_linear
from zoo.ops.recurrence.linear_attention import (
    lightning_slopes,
    normalized_linear_attention,
    retention,
    retention_log_decays,
)
from zoo.ops.recurrence.mlstm import mlstm

ROWS, KEYS, VALUES, CHUNK = 2, 4, 3, 16
SEGMENTS = {"one": lambda t: 0 * t, "several": lambda t: t // 6, "each token": lambda t: t}


def inputs(seq, kind, heads=2, groups=2, seed=0, strength=1.0):
    """Queries, keys, values, log decays and a state, with numpy's numbers; half of the decays are strong ones."""
    draw = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(draw.normal(size=shape), jnp.float32)
    shape = (ROWS, seq, heads, *((KEYS,) if kind == "vector" else ()))
    decay = -jnp.abs(normal(*shape)) * jnp.asarray(draw.choice([0.01, strength], shape), jnp.float32)
    query, key = normal(ROWS, seq, groups, KEYS), normal(ROWS, seq, groups, KEYS)
    value, state = normal(ROWS, seq, heads, VALUES), normal(ROWS, heads, KEYS, VALUES)
    return query, key, value, None if kind == "none" else decay, state


def far(a, b):
    return float(jnp.abs(a - b).max() / jnp.maximum(jnp.abs(b).max(), 1e-3))


@partial(jax.jit, static_argnames="form")
def with_gradients(form, parts, bonus, segments, cotangents):
    def run(parts, bonus):
        query, key, value, decay, state = parts
        options = {} if form is recurrent_gated_linear else {"chunk_size": CHUNK}
        return form(query, key, value, decay, bonus=bonus, state=state, segment_ids=segments, scale=0.5, **options)

    out, back = jax.vjp(run, parts, bonus)
    return out, back(cotangents)


@settings(max_examples=8)
@given(
    seq=st.sampled_from([1, 15, 33]),
    kind=st.sampled_from(["none", "number", "vector", "bonus"]),
    segments=st.sampled_from(sorted(SEGMENTS)),
    strength=st.sampled_from([1.0, 20.0]),
    seed=st.integers(0, 99),
)
def test_the_forms_agree_in_values_states_and_gradients(seq, kind, segments, strength, seed):
    parts = inputs(seq, "vector" if kind == "bonus" else kind, seed=seed, strength=strength)
    bonus = jnp.asarray(np.random.default_rng(seed).normal(size=(2, KEYS)), jnp.float32) if kind == "bonus" else None
    ids = jnp.broadcast_to(SEGMENTS[segments](jnp.arange(seq)), (ROWS, seq))
    cotangents = inputs(seq, "number", seed=seed + 1)[2], inputs(seq, "number", seed=seed + 2)[4]
    out, gradients = with_gradients(recurrent_gated_linear, parts, bonus, ids, cotangents)
    fast, fast_gradients = with_gradients(chunked_gated_linear, parts, bonus, ids, cotangents)
    for a, b in zip(jax.tree.leaves((fast, fast_gradients)), jax.tree.leaves((out, gradients)), strict=True):
        assert far(a, b) < 2e-5


def test_the_recurrent_form_is_the_equation():
    query, key, value, decay, state = (np.asarray(x) for x in inputs(5, "vector"))
    bonus = np.random.default_rng(1).normal(size=(2, KEYS)).astype(np.float32)
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


@pytest.mark.parametrize("kind", ["none", "number"])
def test_heads_that_share_keys_are_those_with_keys_of_their_own(kind):
    query, key, value, decay, state = inputs(21, kind, heads=6, groups=2)
    repeated = [jnp.repeat(x, 3, axis=2) for x in (query, key)]
    for form in (recurrent_gated_linear, partial(chunked_gated_linear, chunk_size=CHUNK)):
        shared = form(query, key, value, decay, state=state)
        apart = form(*repeated, value, decay, state=state)
        assert all(far(a, b) < 1e-6 for a, b in zip(shared, apart, strict=True))


def test_heads_that_cannot_share():
    query, key, value, decay, _ = inputs(3, "vector", heads=4, groups=2)
    with pytest.raises(ValueError, match="4 heads of values share 2 heads of keys, whose decays are vectors"):
        chunked_gated_linear(query, key, value, decay)
    with pytest.raises(ValueError, match="3 heads of values do not share out over 2 heads"):
        recurrent_gated_linear(query, key, value[:, :, :3])


def test_the_strongest_decays_are_finite():
    """-20 a step and far beyond, in one chunk with mild ones: neither inf nor NaN, forward or backward."""
    for strength in (20.0, 1e4):
        for kind in ("number", "vector"):
            parts = inputs(40, kind, strength=strength)
            cotangents = parts[2], parts[4]
            out = with_gradients(chunked_gated_linear, parts, None, jnp.zeros((ROWS, 40), jnp.int32), cotangents)
            assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(out))


@pytest.mark.parametrize("kind", ["number", "vector"])
def test_half_precision_rounds_inputs_scores_and_reads(kind):
    """Bound: 2 ** -8 is what bfloat16 rounds by; sums of dozens of such terms stay within four of it."""
    query, key, value, decay, state = inputs(33, kind)
    low = [x.astype(jnp.bfloat16) for x in (query, key, value)]
    exact = recurrent_gated_linear(*(x.astype(jnp.float32) for x in low), decay, state=state)
    output, after = chunked_gated_linear(*low, decay, state=state, chunk_size=CHUNK)
    assert output.dtype == jnp.bfloat16 and after.dtype == jnp.float32
    assert far(output.astype(jnp.float32), exact[0]) < 2**-6 and far(after, exact[1]) < 2**-6


@pytest.mark.parametrize("kind", ["none", "number", "vector"])
def test_stretches_compose(kind):
    """What two stretches do to a state, one after the other, is what all tokens do."""
    query, key, value, decay, state = inputs(37, kind)
    _, expected = chunked_gated_linear(query, key, value, decay, state=state, chunk_size=CHUNK)
    for now in (slice(0, 20), slice(20, 37)):
        own = None if decay is None else decay[:, now]
        factor, added = affine_gated_linear(key[:, now], value[:, now], own, chunk_size=CHUNK)
        assert factor.shape == ((ROWS, 2, KEYS) if kind == "vector" else (ROWS, 2))
        state = (factor[..., None] if kind == "vector" else factor[..., None, None]) * state + added
    assert far(state, expected) < 1e-6
    ids = jnp.broadcast_to(jnp.arange(37) // 30, (ROWS, 37))
    assert not affine_gated_linear(key, value, decay, segment_ids=ids, chunk_size=CHUNK).factor.any()


@given(st.booleans(), st.booleans(), st.integers(0, 99))
def test_decayed_products(strict, before, seed):
    draw = np.random.default_rng(seed)
    rows, columns, decay = (draw.normal(size=(16, 3)).astype(np.float32) for _ in range(3))
    decay = -np.abs(decay) * 3
    expected, ones = np.zeros((16, 16)), np.zeros((16, 16))
    for i in range(16):
        for j in range(i if strict or before else i + 1):
            between = np.exp(decay[j + 1 : i if before else i + 1].astype(np.float64).sum(0))
            expected[i, j], ones[i, j] = (rows[i] * columns[j] * between).sum(), between[0]
    rules = {"strict": strict, "exclusive": before}
    assert far(decayed_product(*map(jnp.asarray, (rows, columns, decay)), **rules), expected) < 1e-6
    assert far(exp_segsum(jnp.asarray(decay[:, 0]), **rules), ones) < 1e-6


def test_a_normalized_output_is_an_average():
    query, key, value, _, _ = inputs(9, "none")
    output, _ = normalized_linear_attention(jnp.exp(query), jnp.exp(key), jnp.ones_like(value))
    assert far(output, jnp.ones_like(value)) < 1e-6
    assert not normalized_linear_attention(query, 0 * key, value, mode="recurrent")[0].any()


def test_fixed_decays():
    assert far(jnp.exp(retention_log_decays(3)), jnp.array([1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128])) < 1e-6
    assert far(lightning_slopes(4), jnp.array([2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0])) < 1e-6
    assert not lightning_slopes(4, 1).any()
    query, key, value, _, state = inputs(7, "none")
    output, _ = retention(query, key, value, log_decay=jnp.zeros(2), scale=1, state=state)
    assert far(output, gated_linear.recurrent_gated_linear(query, key, value, state=state)[0]) < 1e-6


@pytest.mark.parametrize("form", ["recurrent", "chunked"])
def test_an_mlstm_with_gates_of_any_size(form):
    """Inputs of exp(±80) and beyond leave outputs and gradients finite; later segments are rows of their own."""
    query, key, value, _, _ = inputs(20, "none")
    draw = np.random.default_rng(3)
    gates = [jnp.asarray(100 * draw.normal(size=(ROWS, 20, 2)), jnp.float32) for _ in range(2)]
    ids = jnp.broadcast_to(jnp.arange(20) // 12, (ROWS, 20))
    run = jax.jit(lambda *x: mlstm(*x, segment_ids=ids, mode=form)[0])
    output = run(query, key, value, *gates)
    alone, _ = mlstm(*(x[:, 12:] for x in (query, key, value, *gates)), mode=form)
    assert far(output[:, 12:], alone) < 1e-5
    gradients = jax.grad(lambda *x: (run(*x) ** 2).sum(), (0, 1, 2, 3, 4))(query, key, value, *gates)
    assert all(bool(jnp.isfinite(x).all()) for x in (output, *gradients))
