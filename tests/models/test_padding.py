"""Padded, packed and continued rows against each text alone, for padding, documents and turns drawn by hypothesis."""

from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo
from zoo.layers.rotary import Rotary
from zoo.layers.token_info import count_positions, token_info

VOCAB, ROWS, SEQ = 40, 3, 12
SIZES: dict[str, Any] = {"vocab": VOCAB, "embed": 16, "layers": 2}
MODELS = {
    "attention": partial(zoo.models.Transformer, **SIZES, heads=2, mlp=16),
    "window": partial(
        zoo.models.Hybrid,
        **SIZES,
        pattern=[partial(zoo.layers.Attention, heads=2, window=4, rotary=Rotary(8))],
        mlp=16,
    ),
    "Mamba": partial(zoo.models.Mamba, **SIZES),
    "GatedDeltaNet": partial(zoo.models.GatedDeltaNet, **SIZES, heads=2, mlp=16),
    "RWKV7": partial(zoo.models.RWKV7, **SIZES, heads=2, mlp=16),
    "Griffin": partial(zoo.models.Griffin, **(SIZES | {"layers": 3}), heads=2, mlp=16, window=4),
}
LENGTHS = (2, 5, 9, 12)
"""Of texts, so that few shapes compile."""

run = eqx.filter_jit(lambda model, tokens, given: model(tokens, **given))
BY_DEFAULT = ("attention", "Mamba", "Griffin")
all_models = pytest.mark.parametrize(
    "kind", [kind if kind in BY_DEFAULT else pytest.param(kind, marks=pytest.mark.ci) for kind in MODELS]
)
few_examples = settings(max_examples=12, deadline=None, derandomize=True)


@cache
def make_model(kind: str) -> Any:
    return eqx.filter_jit(MODELS[kind])(key=jax.random.key(0))


@cache
def compute_alone(kind: str, text: bytes) -> np.ndarray:
    tokens = np.frombuffer(text, np.int32)[None]
    return np.asarray(run(make_model(kind), tokens, {}))[0]


def expect(kind: str, text: np.ndarray) -> np.ndarray:
    return compute_alone(kind, text.astype(np.int32).tobytes())


def draw_tokens(data: Any, shape: tuple[int, ...] = (ROWS, SEQ)) -> np.ndarray:
    return np.random.default_rng(data.draw(st.integers(0, 2**16))).integers(1, VOCAB, shape).astype(np.int32)


@all_models
@few_examples
@given(data=st.data())
def test_padded_rows_equal_texts_alone(kind, data):
    tokens = draw_tokens(data)
    ends = [data.draw(st.tuples(st.sampled_from(LENGTHS), st.booleans())) for _ in range(ROWS)]
    spans = [(SEQ - length, SEQ) if is_left else (0, length) for length, is_left in ends]
    mask = np.array([[start <= i < end for i in range(SEQ)] for start, end in spans])
    positions = np.where(mask, mask.cumsum(1) - 1, -1)
    for arguments in ({"mask": mask}, {"positions": positions}):
        logits = np.asarray(run(make_model(kind), tokens, arguments))
        for row, (start, end) in enumerate(spans):
            np.testing.assert_allclose(logits[row, start:end], expect(kind, tokens[row, start:end]), atol=2e-5)


@all_models
@few_examples
@given(data=st.data())
def test_packed_rows_equal_documents_alone(kind, data):
    tokens, segment_ids, documents = draw_tokens(data), np.zeros((ROWS, SEQ), np.int32), []
    for row in range(ROWS):
        names, start = data.draw(st.permutations([1, 2, 3, 7, 90])), 0
        while SEQ - start >= LENGTHS[0]:
            length = data.draw(st.sampled_from([length for length in LENGTHS if length <= SEQ - start]))
            segment_ids[row, start : start + length] = names.pop()
            documents.append((row, start, start + length))
            start += length + data.draw(st.integers(0, 2))  # padding between documents
            if not names:
                break
    logits = np.asarray(run(make_model(kind), tokens, {"segment_ids": segment_ids}))
    for row, start, end in documents:
        np.testing.assert_allclose(logits[row, start:end], expect(kind, tokens[row, start:end]), atol=2e-5)


@eqx.filter_jit
def run_turn(model: Any, tokens: Any, positions: Any, states: Any) -> Any:
    hidden, states = model.hidden(tokens, token_info(tokens, positions=positions), states)
    return model.logits(hidden.x), states


@all_models
@few_examples
@given(data=st.data())
def test_padded_turns_equal_texts_alone(kind, data):
    tokens, model, turns = draw_tokens(data), make_model(kind), 3
    # Each row has 12 tokens, in turns of at most 6: 12 of 18 places.
    counts = [
        data.draw(st.sampled_from([(6, 6, 0), (6, 0, 6), (0, 6, 6), (4, 4, 4), (2, 6, 4), (5, 1, 6)]))
        for _ in range(ROWS)
    ]
    states, seen, logits = model.init_state(ROWS, 16), np.zeros(ROWS, int), [[] for _ in range(ROWS)]
    for turn in range(turns):
        padded = np.ones((ROWS, 6), np.int32)
        mask: Any = np.zeros((ROWS, 6), bool)
        for row in range(ROWS):
            count = counts[row][turn]
            padded[row, 6 - count :] = tokens[row, seen[row] : seen[row] + count]
            mask[row, 6 - count :] = True
        result, states = run_turn(model, padded, count_positions(mask, jnp.asarray(seen)), states)
        seen = seen + mask.sum(1)
        for row in range(ROWS):
            logits[row].append(np.asarray(result)[row, mask[row]])
    for row in range(ROWS):
        np.testing.assert_allclose(np.concatenate(logits[row]), expect(kind, tokens[row]), atol=2e-5)


@pytest.mark.parametrize("kind", ["Mamba", "RWKV7", "Griffin"])
def test_padding_that_is_not_left_gives_nan_with_states(kind):
    tokens, model = np.ones((2, 4), np.int32), make_model(kind)
    positions = np.array([[-1, 0, 1, 2], [0, 1, 2, -1]])
    logits, _ = run_turn(model, tokens, positions, model.init_state(2, 8))
    assert np.isfinite(logits[0, 1:]).all() and np.isnan(logits[1]).all()
