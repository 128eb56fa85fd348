"""Delta rules: chunks are the recurrence, and the recurrence is its equation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zoo.ops.recurrence import generalized_delta
from zoo.ops.recurrence.delta_rule import delta_rule, gated_delta_product, gated_delta_rule, kda
from zoo.ops.recurrence.rwkv7 import rwkv7
from zoo.ops.recurrence.triangular import invert_unit_triangular

BATCH, HEADS, KEY_DIM, VALUE_DIM = 2, 2, 4, 3
CASES = [
    (1, "number", 1, False),
    (7, "vector", 1, True),
    (16, "none", 1, False),
    (17, "number", 2, False),
    (17, "vector", 2, True),
    (33, "number", 1, True),
    (33, "vector", 1, False),
]
"""Tokens, decays, steps, whether the state is read before its decay: chunks of 16 rows, one, several and a part."""


def draw(seq, decays, steps, seed, strength=1.0, dtype=jnp.float32):
    """Inputs of the skeleton: keys of length one, rates up to 2, decays of which a half is weak."""
    draw = np.random.default_rng(seed)
    normal = lambda *dims: draw.normal(size=(BATCH, *dims)).astype(np.float32)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    rows = (seq * steps, HEADS)
    write = unit(normal(*rows, KEY_DIM))
    inputs = {
        "query": normal(seq, HEADS, KEY_DIM),
        "read": -draw.uniform(0, 2, (BATCH, *rows, 1)).astype(np.float32) * write,
        "write": write,
        "write_value": normal(*rows, VALUE_DIM),
        "key": unit(normal(*rows, KEY_DIM)),
        "value": normal(*rows, VALUE_DIM),
        "state": normal(HEADS, KEY_DIM, VALUE_DIM),
    }
    inputs = {name: jnp.asarray(x, jnp.float32 if name == "state" else dtype) for name, x in inputs.items()}
    if decays != "none":
        dims = (seq, HEADS) if decays == "number" else (seq, HEADS, KEY_DIM)
        inputs["log_decay"] = -strength * jnp.abs(normal(*dims)) * draw.choice([0.01, 1], dims)
    return inputs


def segments(seq, often, seed):
    """Ids that change with this probability at a token."""
    return jnp.asarray((np.random.default_rng(seed).random((BATCH, seq)) < often).cumsum(1))


@partial(jax.jit, static_argnums=(0, 1, 2))
def value_and_gradients(form, steps, before, inputs, segment_ids, cotangents):
    def outputs(inputs):
        names = {name: x for name, x in inputs.items() if name != "query"}
        return form(inputs["query"], **names, steps=steps, read_before_decay=before, segment_ids=segment_ids, scale=0.5)

    found, back = jax.vjp(outputs, inputs)
    return found, back(cotangents)[0]


def all_close(found, expected, bound):
    """To `bound` of the largest magnitude of each array."""
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound * max(np.abs(theirs).max(), 1e-3))


small_chunks = partial(generalized_delta.chunked_delta, chunk_size=16)


@settings(max_examples=6)
@given(
    case=st.sampled_from(CASES),
    often=st.sampled_from([0.0, 0.1, 0.6]),
    strength=st.sampled_from([0.1, 20.0]),
    seed=st.integers(0, 99),
)
@example(case=CASES[4], often=0.1, strength=1.0, seed=0)
@example(case=CASES[5], often=0.1, strength=1.0, seed=0)
def test_chunks_are_the_recurrence(case, often, strength, seed):
    seq, decays, steps, before = case
    inputs, segment_ids = draw(seq, decays, steps, seed, strength), segments(seq, often, seed)
    keys = jax.random.split(jax.random.key(seed))
    cotangents = (
        jax.random.normal(keys[0], (BATCH, seq, HEADS, VALUE_DIM)),
        jax.random.normal(keys[1], (BATCH, HEADS, KEY_DIM, VALUE_DIM)),
    )
    found = value_and_gradients(small_chunks, steps, before, inputs, segment_ids, cotangents)
    expected = value_and_gradients(generalized_delta.recurrent_delta, steps, before, inputs, segment_ids, cotangents)
    all_close(found[0], expected[0], 2e-5)
    all_close(found[1], expected[1], 1e-4)


def by_the_table(op, query, key, value, beta=None, log_decay=None, read=None, write=None, state=None):
    """The equations of the operations, written out for one token, one head and one row of the batch at a time."""
    steps, outputs, last = key.shape[1] // query.shape[1], np.zeros((*query.shape[:3], value.shape[3])), state.copy()
    for b, t, h in np.ndindex(*query.shape[:3]):
        s = last[b, h]
        decay = np.ones((key.shape[3], 1)) if log_decay is None else np.exp(log_decay[b, t, h]).reshape(-1, 1)
        if op is rwkv7:
            s = decay * s + np.outer(write[b, t, h], read[b, t, h] @ s) + np.outer(key[b, t, h], value[b, t, h])
        else:
            s = decay * s
            for k, v, rate in zip(*(x[b, steps * t : steps * t + steps, h] for x in (key, value, beta)), strict=True):
                s = s + np.outer(k, rate * (v - k @ s))
        outputs[b, t, h] = query[b, t, h] @ s * (1 if op is rwkv7 else key.shape[3] ** -0.5)
        last[b, h] = s
    return outputs, last


OPS = {
    delta_rule: ("none", 1, ("beta",)),
    gated_delta_rule: ("number", 1, ("beta", "log_decay")),
    kda: ("vector", 1, ("beta", "log_decay")),
    gated_delta_product: ("number", 2, ("beta", "log_decay")),
    rwkv7: ("vector", 1, ("log_decay", "read", "write")),
}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_operations_are_their_equations(op):
    decays, steps, names = OPS[op]
    inputs = draw(5, decays, steps, seed=1)
    inputs["beta"] = jnp.abs(inputs["value"][..., 0])
    given = {name: inputs[name] for name in ("query", "key", "value", *names, "state")}
    expected = by_the_table(op, **{name: np.asarray(x, np.float64) for name, x in given.items()})
    all_close(op(**given, mode="recurrent"), expected, 5e-6)
    all_close(op(**given, mode="chunked"), expected, 2e-5)


def test_half_precision():
    """Chunks in bfloat16 against the recurrence in float32 on the same numbers: operands are rounded to 2^-9, a handful
    of times between an input and the output, and errors of rows are carried on by later ones."""
    inputs = draw(33, "number", 1, seed=3, dtype=jnp.bfloat16)
    wide = {name: x.astype(jnp.float32) for name, x in inputs.items()}
    output, state = small_chunks(**inputs)
    assert output.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    expected = jax.jit(generalized_delta.recurrent_delta)(**wide)
    all_close((output, state), expected, 2**-6)


@pytest.mark.parametrize(("decays", "before"), [("number", False), ("vector", True)])
def test_the_strongest_decays_are_finite(decays, before):
    seq = 33
    inputs = draw(seq, decays, 1, seed=2)
    cotangents = jnp.ones((BATCH, seq, HEADS, VALUE_DIM)), inputs["state"]
    for strength in (20.0, 1e4):
        inputs["log_decay"] = jnp.full_like(inputs["log_decay"], -strength)
        found = value_and_gradients(small_chunks, 1, before, inputs, segments(seq, 0, 0), cotangents)
        assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(found))


@pytest.mark.parametrize(("decays", "steps", "before"), [("number", 2, False), ("vector", 1, True)])
def test_stretches_compose(decays, steps, before):
    inputs = draw(33, decays, steps, seed=4)
    query, state = inputs.pop("query"), inputs.pop("state")
    stretch = lambda x, first, last: x[:, first * x.shape[1] // 33 : last * x.shape[1] // 33]
    options = dict(steps=steps, read_before_decay=before, chunk_size=16)
    affine = jax.jit(partial(generalized_delta.affine_delta, **options))
    ids = jnp.zeros((BATCH, 33), int)
    cut = lambda first, last: {name: stretch(x, first, last) for name, x in inputs.items()}
    one, two = (affine(**cut(*which), segment_ids=stretch(ids, *which)) for which in [(0, 16), (16, 33)])
    between = one.factor @ state + one.offset
    _, expected = generalized_delta.recurrent_delta(query, **inputs, state=state, steps=steps, read_before_decay=before)
    all_close(two.factor @ between + two.offset, expected, 2e-5)
    begun = affine(**cut(16, 33), segment_ids=stretch(ids.at[0, 20:].set(1), 16, 33))
    assert not begun.factor[0].any()
    all_close((begun.factor[1], begun.offset[1]), (two.factor[1], two.offset[1]), 1e-6)


@pytest.mark.parametrize("size", [48, 64])
def test_the_inverse_where_it_is_hard(size):
    """Keys within 3 degrees of one another and rates near 2: rows of the inverse alternate, and all sums cancel."""
    draw = np.random.default_rng(0)
    keys = 1 + 0.05 * draw.normal(size=(3, size, 16)) / 4
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    lower = np.tril(-1.99 * keys @ keys.swapaxes(-1, -2), -1).astype(np.float32)
    expected = np.linalg.inv(np.eye(size) - lower.astype(np.float64))
    all_close(jax.jit(invert_unit_triangular)(jnp.asarray(lower)), expected, 2e-5)


def test_a_gradient_does_not_keep_the_state_of_every_token():
    seq, width = 256, 32
    shapes = [(1, seq, 1, width)] * 4
    loss = lambda *x: (generalized_delta.chunked_delta(*x, chunk_size=16)[0] ** 2).sum()
    program = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    assert program.compile().memory_analysis().temp_size_in_bytes < seq * width * width * 4


def test_what_cannot_be_raises():
    inputs = draw(4, "none", 1, seed=0)
    query, read, write, new, key = (inputs[name] for name in ("query", "read", "write", "write_value", "key"))
    with pytest.raises(ValueError, match="2 steps for each of 4 tokens are 8 rows, and there are 4"):
        generalized_delta.recurrent_delta(query, read, write, new, steps=2)
    with pytest.raises(ValueError, match="keys and values, or neither"):
        generalized_delta.chunked_delta(query, read, write, new, key=key)
    with pytest.raises(ValueError, match="new or value"):
        generalized_delta.chunked_delta(query, read, write)
    with pytest.raises(ValueError, match="chunk is 24"):
        generalized_delta.chunked_delta(query, read, write, new, chunk_size=24)
