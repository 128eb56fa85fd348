"""Batches that a model writes itself: its samples behind the prompts of a batch."""

import jax
import numpy as np
import pytest

import zoo
from zoo import train

KEY = jax.random.key(0)
WIDTH = 12


def make_batch(texts, trained):
    """Rows of one text each, whose last tokens are trained on."""
    starts = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
    masks = [np.arange(len(text))[::-1] < count for text, count in zip(texts, trained, strict=True)]
    rows = train.PackedRows(np.concatenate(texts), np.concatenate(masks), starts, WIDTH, pack=False)
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.fixture(scope="module")
def model():
    return zoo.models.Transformer(vocab=32, embed=16, layers=1, heads=2, mlp=16, key=KEY)


def test_rows_have_the_prompt_and_what_was_sampled(model):
    """A chat, a chat with a long prompt, and a text that is trained on from its first target."""
    texts = [np.arange(1, 7), np.arange(1, 13), np.arange(3, 14)]
    batch = make_batch(texts, (3, 2, 10))
    prompts = [texts[0][:3], texts[1][3:10], texts[2][:7]]  # of 7 tokens at most
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    options = {"max_new_tokens": 5, "mesh": mesh, "stop_tokens": range(16)}
    rows = train.sample_batch(model, batch, key=KEY, **options)
    assert {name: (x.shape, x.dtype) for name, x in rows.items()} == {
        name: (x.shape, x.dtype) for name, x in batch.items()
    }
    for row, prompt in enumerate(prompts):
        length = int(rows["segment_ids"][row].sum())
        text = np.append(rows["tokens"][row, :length], rows["targets"][row, length - 1])
        np.testing.assert_array_equal(text[: len(prompt)], prompt)
        new = text[len(prompt) :]
        assert 1 <= len(new) <= 5 and (new[:-1] >= 16).all(), "a stop token ends a text"
        assert len(new) == 5 or new[-1] < 16
        np.testing.assert_array_equal(rows["targets"][row, : length - 1], text[1:-1])
        weights = (np.arange(WIDTH) >= len(prompt) - 1) & (np.arange(WIDTH) < length)
        np.testing.assert_array_equal(rows["weights"][row], weights)
        np.testing.assert_array_equal(rows["positions"][row, :length], np.arange(length))
        assert (rows["targets"][row, length:] == -1).all()
    again = train.sample_batch(model, batch, key=KEY, **options)
    other = train.sample_batch(model, batch, key=jax.random.key(1), **options)
    assert all((again[name] == x).all() for name, x in rows.items())
    assert any((other[name] != x).any() for name, x in rows.items())


def test_rows_without_room_and_greedy_samples_are_refused(model):
    batch = make_batch([np.arange(1, 7)], (3,))
    options = {"mesh": zoo.make_mesh(devices=jax.devices()[:1]), "key": KEY}
    with pytest.raises(ValueError, match="rows of 12 tokens hold a prompt and 1 to 11 new tokens"):
        train.sample_batch(model, batch, max_new_tokens=12, **options)
    with pytest.raises(ValueError, match="temperature=0"):
        train.sample_batch(model, batch, max_new_tokens=2, temperature=0.0, **options)
