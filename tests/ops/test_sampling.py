"""Sampling filters against their papers' rules in Python and against transformers' processors, and invariants."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from scipy import stats

from zoo.ops.sampling import (
    apply_temperature,
    filter_logits,
    penalize_frequency,
    penalize_presence,
    penalize_repetition,
    sample_tokens,
)

VOCAB = 9
ROWS = st.lists(
    st.lists(st.integers(-6, 6).map(lambda x: x / 2) | st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB),
    min_size=2,
    max_size=2,
)


def softmax(x):
    e = np.exp(np.float64(x) - np.max(x))
    return e / e.sum()


def filter_reference(logits, top_k=None, top_p=None, min_p=None):
    """Return the kept ids of one row by the rules of the papers, or None where rounding may decide."""
    ids = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k is not None:
        lowest = logits[ids[min(top_k, len(ids)) - 1]]
        ids = [i for i in ids if logits[i] >= lowest]
    if top_p is not None:
        kept, total = [], 0.0
        for i, probability in zip(ids, softmax([logits[i] for i in ids]), strict=True):
            if abs(total - top_p) < 1e-5 and total < 1:
                return None
            if kept and total >= top_p:
                break
            kept.append(i)
            total += probability
        ids = kept
    if min_p is not None:
        probabilities = softmax([logits[i] for i in ids])
        if (np.abs(probabilities - min_p * probabilities.max()) < 1e-6)[1:].any():
            return None
        ids = [i for i, p in zip(ids, probabilities, strict=True) if p >= min_p * probabilities.max()]
    return sorted(ids)


@given(
    rows=ROWS,
    top_k=st.none() | st.integers(1, VOCAB + 2),
    top_p=st.none() | st.floats(0.01, 1),
    min_p=st.none() | st.floats(0, 1),
)
def test_filter_logits_equals_the_papers_rules(rows, top_k, top_p, min_p):
    rows = np.array(rows, np.float32)
    expected = [filter_reference(row, top_k, top_p, min_p) for row in rows]
    assume(None not in expected)
    cut = np.asarray(jax.jit(filter_logits)(jnp.asarray(rows), top_k=top_k, top_p=top_p, min_p=min_p))
    assert [list(np.flatnonzero(np.isfinite(row))) for row in cut] == expected
    assert (cut[np.isfinite(cut)] == rows[np.isfinite(cut)]).all()


@given(rows=ROWS, top_k=st.integers(1, VOCAB), top_p=st.floats(1e-6, 1), min_p=st.floats(0, 1))
def test_filter_logits_keeps_the_likeliest_and_is_monotonic(rows, top_k, top_p, min_p):
    logits = jnp.array(rows, jnp.float32)
    kept = lambda **options: jnp.isfinite(filter_logits(logits, **options))
    for options in ({"top_k": top_k}, {"top_p": top_p}, {"min_p": min_p}, {"top_k": top_k, "top_p": top_p}):
        assert jnp.take_along_axis(kept(**options), logits.argmax(1)[:, None], 1).all()
    assert (kept(top_k=top_k) <= kept(top_k=top_k + 1)).all()
    assert (kept(top_p=top_p) <= kept(top_p=min(1, top_p * 1.5))).all()
    assert (kept(min_p=min_p) <= kept(min_p=min_p / 2)).all()
    assert jnp.array_equal(filter_logits(logits, top_k=VOCAB, min_p=0.0), logits)


def test_filter_logits_keeps_all_at_neutral_values():
    """Neutral values keep every token, however unlikely, and setting an option does not trace again."""
    traces = []

    @jax.jit
    def run(logits, top_k, top_p, min_p):
        traces.append(1)
        return filter_logits(logits, top_k=top_k, top_p=top_p, min_p=min_p)

    logits = jnp.array([[0.0, 1.0, -200.0, 1.0]])
    assert run(logits, 4, 1.0, 0.0).tolist() == logits.tolist()
    kept = lambda *options: jnp.isfinite(run(logits, *options))[0].tolist()
    assert kept(3, 1.0, 0.0) == [True, True, False, True] and kept(1, 1.0, 0.0) == [False, True, False, True]
    assert kept(4, 0.4, 0.0) == [False, True, False, False] and kept(4, 1.0, 0.9) == [False, True, False, True]
    assert len(traces) == 1


def test_filter_logits_top_p_of_ties_keeps_the_fewest():
    """A threshold on the logits would keep all of them."""
    kept = jnp.isfinite(filter_logits(jnp.zeros((1, 8)), top_p=0.5))
    assert kept[0].tolist() == [True] * 4 + [False] * 4
    assert jnp.isfinite(filter_logits(jnp.array([[1.0, 2.0, 2.0, 0.0]]), top_k=1)).tolist() == [
        [False, True, True, False]
    ]


def test_filter_logits_top_p_includes_the_crossing_token():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]]))
    sizes = [int(jnp.isfinite(filter_logits(logits, top_p=p)).sum()) for p in (0.01, 0.49, 0.51, 0.74, 0.76, 0.9, 1.0)]
    assert sizes == [1, 1, 2, 2, 3, 4, 4]


def test_filter_logits_top_p_is_a_share_of_the_top_k():
    """Of the two likeliest, the first has 4 / 7; of all four tokens it has 0.4."""
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    sizes = [int(jnp.isfinite(filter_logits(logits, top_k=2, top_p=p)).sum()) for p in (0.55, 0.6)]
    assert sizes == [1, 2]


def test_filter_logits_top_p_of_one_keeps_a_tiny_tail():
    logits = jnp.zeros((1, 4096)).at[0, 0].set(20.0)  # each of the rest 2e-9, together 8e-6
    assert jnp.isfinite(filter_logits(logits, top_p=1.0)).all()


@given(rows=ROWS, penalty=st.floats(0.25, 4), bits=st.integers(0, 2 ** (2 * VOCAB) - 1))
def test_penalize_repetition_equals_its_formula(rows, penalty, bits):
    rows = np.array(rows, np.float32)
    seen = np.array([bits >> i & 1 for i in range(rows.size)], bool).reshape(rows.shape)
    expected = [
        [(x / penalty if x > 0 else x * penalty) if was else x for x, was in zip(row, marks, strict=True)]
        for row, marks in zip(rows, seen, strict=True)
    ]
    assert np.allclose(penalize_repetition(jnp.asarray(rows), jnp.asarray(seen), penalty), expected, rtol=1e-6)


@pytest.mark.parametrize("temperature", [1e-45, 1e-9, 0.5, 1, 7.0])
def test_apply_temperature_is_finite_for_low_temperatures(temperature):
    logits = jnp.array([[3.0, -1e4, 2.0, 0.5]])
    got = jax.nn.softmax(apply_temperature(logits, temperature))[0]
    assert np.allclose(got, softmax(np.array(logits[0]) / max(temperature, 1e-30)), atol=1e-6)


def test_sample_tokens_follows_the_softmax_row_by_row():
    logits = jnp.broadcast_to(jnp.array([2.0, -jnp.inf, 1.0, 0.0, 0.5]), (4000, 5))
    keys = jax.random.split(jax.random.key(0), 4000)
    tokens = sample_tokens(logits, keys)
    counts, expected = np.bincount(tokens, minlength=5), 4000 * softmax(np.array(logits[0]))
    assert counts[1] == 0
    assert stats.chisquare(np.delete(counts, 1), np.delete(expected, 1)).pvalue > 1e-3
    assert jnp.array_equal(sample_tokens(logits[7:9], keys[7:9]), tokens[7:9])


FIXTURE = Path(__file__).parents[1] / "fixtures" / "sampling" / "processors.safetensors"
OPTIONS = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.1}
OPTIONS |= {"repetition": 1.3, "presence": 0.6, "frequency": -0.4}
SETTINGS = {
    **{name: (name,) for name in OPTIONS},
    "truncated": ("temperature", "top_k", "top_p", "min_p"),
    "penalized": ("repetition", "presence", "frequency"),
    "all": tuple(OPTIONS),
}
NEUTRAL = {"temperature": 1.0, "top_k": 23, "top_p": 1.0, "min_p": 0.0}
NEUTRAL |= {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}


def process(logits, seen, counts, *, temperature, repetition, presence, frequency, **filters):
    """Probabilities after all rules, in the order of `zoo.generate`."""
    logits = penalize_repetition(logits, seen, repetition)
    logits = penalize_frequency(penalize_presence(logits, counts, presence), counts, frequency)
    return jax.nn.softmax(filter_logits(apply_temperature(logits, temperature), **filters))


@pytest.mark.one_case
@pytest.mark.parametrize("name", SETTINGS)
def test_rules_equal_the_processors_of_transformers(name):
    """One by one and together; `scripts/make_sampling_fixtures.py` has the reference."""
    case = load_file(FIXTURE)
    tokens = case["tokens"]
    count = lambda tokens: np.stack([np.bincount(row, minlength=case["logits"].shape[1]) for row in tokens])
    options = NEUTRAL | {option: OPTIONS[option] for option in SETTINGS[name]}
    counts = jnp.asarray(count(tokens[:, -int(case["new"]) :]))
    found = jax.jit(process)(jnp.asarray(case["logits"]), jnp.asarray(count(tokens) > 0), counts, **options)
    np.testing.assert_allclose(found, case[name], atol=1e-6)
    assert ((np.asarray(found) > 0) == (case[name] > 0)).all()
