"""Scores of texts: at the last token, alone or packed, on every mesh, and losses of them.

The environment variable ZOO_PARITY names a folder with a reward model, its scores and the loss of TRL's RewardTrainer.
"""

import dataclasses
import json
import os
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import zoo
from zoo import train
from zoo.models import SequenceScore, Transformer, classification_loss
from zoo.text.batches import OrderedBatches

PARITY = Path(os.environ.get("ZOO_PARITY", "")) / "posttraining"
LENGTHS = (9, 4, 7, 1, 8, 3, 5, 6, 9, 2, 2, 7, 3, 8, 4, 6)
LABELS = np.arange(len(LENGTHS)) % 3
MESHES = {
    "one device": ({}, 1, 1),
    "data 2 x fsdp 2 x tensor 2": ({"data": 2, "fsdp": 2, "tensor": 2}, 8, 1),
    "fsdp 2 x context 2 x tensor 2": ({"fsdp": 2, "context": 2, "tensor": 2}, 8, 1),
    "two micro-batches": ({"data": 2, "tensor": 2}, 4, 2),
}
"""Sizes, devices and micro-batches."""


def make_model(classes=3, **options):
    sizes = {"vocab": 64, "embed": 16, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 24, **options}
    return SequenceScore.from_decoder(Transformer(**sizes, key=jax.random.key(0)), classes, key=jax.random.key(1))


def make_texts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 64, length) for length in LENGTHS]


def pad(texts, length, side="right"):
    """Texts in a row each, and their mask."""
    tokens = np.zeros((len(texts), length), np.int32)
    mask = np.zeros((len(texts), length), bool)
    for row, text in enumerate(texts):
        start = length - len(text) if side == "left" else 0
        tokens[row, start : start + len(text)] = text
        mask[row, start : start + len(text)] = True
    return tokens, mask


def pack(texts, seq_len, rows, **options):
    """One batch of whole texts."""
    starts = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
    tokens = np.concatenate(texts)
    options = {"whole": True, "too_long": "drop", **options}
    dataset = train.PackedRows(tokens, np.ones(len(tokens), bool), starts, seq_len, **options)
    assert dataset.num_dropped == 0
    (batch,) = OrderedBatches(dataset, rows, process=(0, 1))
    return batch


def compute(loss_fn, model, batch, mesh):
    """Return loss and gradient on a mesh."""
    sizes, devices, microbatches = MESHES[mesh]
    mesh = zoo.make_mesh(**{"data": 1, **sizes}, devices=jax.devices()[:devices])
    gradient = zoo.value_and_grad(loss_fn, mesh, microbatches=microbatches)
    return jax.device_get(eqx.filter_jit(gradient)(zoo.place(model, mesh), zoo.place_batch(batch, mesh)))


def classify(model, batch):
    return classification_loss(model, batch)


def prefer(model, batch):
    """The loss of reward models, of pairs in a row each."""
    chosen, rejected = model.score_texts(batch, 2)[..., 0].T
    losses = train.objectives.pairwise_reward(chosen, rejected)
    return losses.sum(), losses.size


@eqx.filter_jit
def score_rows(model, tokens, mask):
    return model(tokens, mask=mask)


@eqx.filter_jit
def score_texts(model, batch, texts):
    return model.score_texts(batch, texts)


run_classification = eqx.filter_jit(classify)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def plain(model):
    """The mean loss of texts in rows of their own, its gradient, and their scores at the token that ends each."""
    tokens, _ = pad(make_texts(), 12)

    def mean(model):
        scores = model.score_tokens({"tokens": tokens})
        chosen = scores[np.arange(len(LENGTHS)), np.array(LENGTHS) - 1]
        return zoo.models.token_losses(chosen, jnp.asarray(LABELS)).mean(), (chosen, scores)

    (loss, scores), gradient = jax.device_get(eqx.filter_jit(eqx.filter_value_and_grad(mean, has_aux=True))(model))
    return loss, *scores, gradient


def test_a_row_is_scored_at_its_last_real_token(model, plain):
    """Whatever is in the padding: transformers would look for the last token that is not its own."""
    _, expected, of_tokens, _ = plain
    for side in ("right", "left"):
        scores = score_rows(model, *pad(make_texts(), 12, side))
        assert scores.shape == (len(LENGTHS), 3)
        np.testing.assert_allclose(scores, expected, atol=2e-6)
    tokens, mask = pad(make_texts(), 12)
    mask[3] = False
    np.testing.assert_array_equal(score_rows(model, tokens, mask)[3], 0)  # a row of padding
    np.testing.assert_allclose(score_rows(model, tokens, None), of_tokens[:, -1], atol=2e-6)


@pytest.mark.parametrize(
    ("mesh", "packed"),
    [
        ("fsdp 2 x context 2 x tensor 2", True),
        pytest.param("one device", False, marks=pytest.mark.ci),
        pytest.param("two micro-batches", True, marks=pytest.mark.ci),
        pytest.param("data 2 x fsdp 2 x tensor 2", True, marks=pytest.mark.slow),
        pytest.param("data 2 x fsdp 2 x tensor 2", False, marks=pytest.mark.slow),
    ],
)
def test_packed_texts_have_the_loss_of_rows_on_any_mesh(model, plain, mesh, packed):
    expected, _, _, gradient = plain
    if packed:
        batch = pack(make_texts(), 16, 8, labels=LABELS.astype(np.float32))
        assert batch["labels"].shape[1] > 2 and len(batch["labels"]) == 8
    else:
        tokens, mask = pad(make_texts(), 12, "left")
        batch = {"tokens": tokens, "mask": mask, "labels": LABELS}
    loss, grads = compute(classify, model, batch, mesh)
    assert loss == pytest.approx(float(expected), rel=1e-5)
    for found, x in zip(jax.tree.leaves(grads), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(found, x, atol=1e-5 * np.linalg.norm(x) + 1e-8, rtol=0)


@pytest.mark.ci
def test_rows_are_read_where_the_sequence_is_sharded(model, plain):
    _, expected, _, _ = plain
    mesh = zoo.make_mesh(data=1, context=2, devices=jax.devices()[:2])
    tokens, mask = pad(make_texts(), 12)
    batch = {"tokens": tokens, "segment_ids": mask.astype(np.int32), "positions": np.where(mask, np.arange(12), -1)}

    def read(model, batch):
        return model(**batch)

    scores = zoo.spmd(read, mesh, out="batch classes")(zoo.place(model, mesh), zoo.place_batch(batch, mesh))
    np.testing.assert_allclose(scores, expected, atol=2e-6)
    with pytest.raises(ValueError, match="instead of a mask, pass segment_ids"):
        zoo.value(classify, mesh)(zoo.place(model, mesh), {"tokens": tokens, "mask": mask, "labels": LABELS})


def test_pairs_are_two_segments_of_a_row(model, plain):
    """A pair alone in its row and one of several in a row."""
    _, expected, _, _ = plain
    texts = make_texts()
    scores = score_texts(model, pack(texts, 18, 8, texts_per_item=2, pack=False), 2)
    np.testing.assert_allclose(scores, expected.reshape(8, 2, 3), atol=2e-6)
    together = pack(texts, 60, 2, texts_per_item=2)
    most = int(together["segment_ids"].max())
    scores = np.asarray(score_texts(model, together, most + 2))
    assert most > 6 and not scores[:, most:].any()  # texts that are not there
    with pytest.raises(ValueError, match=f"a row has {most} texts, and scores of 2 were asked for"):
        model.score_texts(together, 2)
    assert np.isnan(score_texts(model, together, 2)).any()
    differences = (scores[:, 0::2] - scores[:, 1::2]).reshape(-1, 3)
    found = differences[differences.any(1)]
    np.testing.assert_allclose(np.sort(found, 0), np.sort(expected[0::2] - expected[1::2], 0), atol=4e-6)


def test_labels_of_packed_texts_may_be_negative_and_not_broken(model):
    """Inside programs nothing can be raised for them. Labels beyond the last text do not count."""
    batch = pack(make_texts(), 16, 8, labels=np.where(LABELS == 2, -1, LABELS).astype(np.float32))
    total, count = run_classification(model, batch)
    assert count == np.count_nonzero(LABELS < 2) and np.isfinite(total)
    total, _ = run_classification(model, {**batch, "labels": batch["labels"] + np.float32(0.5)})
    assert np.isnan(total)
    has_target = {**batch, "targets": batch["tokens"]}  # as in rows that lack the last token of each text
    assert np.isnan(run_classification(model, has_target)[0])


def test_a_tied_table_is_only_an_embedding():
    """Tokens that are not in the batch get no gradient, and the head of the language model is gone."""
    model = make_model(tied=True)
    assert zoo.count(make_model(tied=False)) == zoo.count(model)
    tokens = np.array([[1, 2, 3]])
    gradient = eqx.filter_jit(eqx.filter_grad(lambda model: model(tokens).sum()))(model)
    used = np.flatnonzero(np.abs(gradient.decoder.embedding.weight).sum(1))
    assert used.tolist() == [1, 2, 3]
    names = [path.name for path in zoo.models.list_parameter_paths(model)]
    assert names[-1] == "score.weight" and "layers.*.attention.query.weight" in names
    half = zoo.cast(model, jnp.bfloat16)
    assert eqx.filter_eval_shape(half, tokens).dtype == half.score.weight.dtype == jnp.bfloat16
    decoder = dataclasses.replace(half.decoder, head=None)
    assert SequenceScore.from_decoder(decoder, key=jax.random.key(0)).score.weight.dtype == jnp.bfloat16


def test_what_a_model_of_scores_does_not_do_is_named(model):
    tokens = np.array([[1, 2, 3]])
    batch = {"tokens": tokens, "targets": tokens}
    packed = pack(make_texts(), 16, 8, labels=LABELS.astype(np.float32))
    raised = {
        "has no unembedding: it computes hidden states": partial(model.decoder, tokens),
        "text is generated by a Decoder, not by SequenceScore": partial(zoo.generate, model, tokens, max_new_tokens=1),
        "'embedding': model.decoder has it": partial(zoo.cross_entropy, model, batch),
        "has no attribute 'stack': model.decoder has it": partial(getattr, model, "stack"),
        "'eval': a model has no modes": partial(getattr, model, "eval"),
        "takes no edits": partial(zoo.patch, model, {}),
        "classes is 0": partial(SequenceScore.from_decoder, model.decoder, 0, key=jax.random.key(0)),
        "so keep its score": partial(SequenceScore.from_decoder, model.decoder, key=jax.random.key(0)),
        "no weights and no segment_ids": partial(model.score_texts, {"tokens": tokens}, 2),
        "a key 'wieghts' that nothing reads": partial(model.score_tokens, {"tokens": tokens, "wieghts": tokens}),
        "64 is outside the vocabulary": partial(model, np.array([[64]])),
        "the batch has no labels": partial(classification_loss, model, {"tokens": tokens}),
        "the batch has targets, which nothing reads": partial(
            classification_loss, model, {**batch, "labels": np.array([0])}
        ),
        "cross-entropy is always 0": partial(classification_loss, make_model(1), packed),
    }
    for message, call in raised.items():
        with pytest.raises((TypeError, ValueError, AttributeError), match=message):
            call()


@pytest.mark.skipif(not PARITY.exists(), reason="ZOO_PARITY names no folder")
@pytest.mark.parametrize(
    "mesh",
    [
        "one device",
        pytest.param("fsdp 2 x context 2 x tensor 2", marks=pytest.mark.ci),
        pytest.param("two micro-batches", marks=pytest.mark.ci),
        pytest.param("data 2 x fsdp 2 x tensor 2", marks=pytest.mark.slow),
    ],
)
def test_rewards_loss_and_gradient_are_those_of_trl(mesh):
    expected = json.loads((PARITY / "losses.json").read_text())["losses"]["reward"]
    stored = load_file(PARITY / "batches.safetensors")
    tokens = stored["pairs/input_ids"]
    mask = stored["pairs/attention_mask"].astype(bool)
    model = zoo.load(PARITY / "reward")
    np.testing.assert_allclose(model(tokens, mask=mask)[:, 0], expected["rewards"], atol=1e-5)
    order = np.arange(16).reshape(2, 8).T.ravel()  # each chosen text before the rejected one
    batch = pack([tokens[row][mask[row]] for row in order], 48, 8, texts_per_item=2, pack=False)
    loss, grads = compute(prefer, model, batch, mesh)
    assert loss == pytest.approx(expected["loss"], rel=1e-5)
    assert float(optax.tree.norm(grads)) == pytest.approx(expected["gradient_norm"], rel=1e-5)
