"""The loss of SFT is the mean over all trained tokens of a batch, whatever rows, devices and micro-batches hold them.

The environment variable ZOO_PARITY names a folder with the losses of TRL's SFTTrainer.
"""

import json
import os
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
from zoo.text.batches import OrderedBatches

PARITY = Path(os.environ.get("ZOO_PARITY", "")) / "posttraining"
LENGTHS = (40, 33, 30, 24, 17, 13, 9, 9, 8, 6, 5, 4, 3, 2, 2)
TRAINED = (39, 1, 2, 20, 1, 12, 1, 5, 1, 1, 4, 1, 2, 1, 1)
"""Tokens at the end of each text that are trained on."""
MESHES = {
    "one device": ({}, 1, {}),
    "data 2 x fsdp 2 x tensor 2": ({"data": 2, "fsdp": 2, "tensor": 2}, 8, {"microbatches": 2}),
    "fsdp 2 x context 2 x tensor 2": ({"data": 1, "fsdp": 2, "context": 2, "tensor": 2}, 8, {}),
}
"""Sizes, devices and options."""


def make_texts():
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 64, length) for length in LENGTHS]
    masks = [np.arange(length)[::-1] < trained for length, trained in zip(LENGTHS, TRAINED, strict=True)]
    return texts, masks


def make_batch(texts, masks, seq_len, *, pack, rows):
    """One batch with all texts, filled with rows of weight 0."""
    starts = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
    dataset = train.PackedRows(np.concatenate(texts), np.concatenate(masks), starts, seq_len, pack=pack)
    (batch,) = OrderedBatches(dataset, rows, process=(0, 1))
    return batch


def compute(model, batch, mesh):
    """Return loss and gradient as recipes/sft.py computes them."""
    sizes, devices, options = MESHES[mesh]
    mesh = zoo.make_mesh(**sizes, devices=jax.devices()[:devices])
    gradient = zoo.value_and_grad(lambda model, batch: zoo.cross_entropy(model, batch), mesh, **options)
    return jax.device_get(eqx.filter_jit(gradient)(zoo.place(model, mesh), zoo.place_batch(batch, mesh)))


def compute_plainly(model, texts, masks):
    """Each text in a row of its own: the sum of -log p over all trained tokens, divided by their number."""
    length = max(map(len, texts))
    tokens = jnp.array([np.pad(text, (0, length - len(text))) for text in texts])
    is_trained = jnp.array([np.pad(mask, (0, length - len(mask))) for mask in masks], bool)[:, 1:]

    def mean(model):
        log_probs = jax.nn.log_softmax(model(tokens)[:, :-1])
        chosen = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
        return -jnp.where(is_trained, chosen, 0).sum() / is_trained.sum()

    return jax.device_get(eqx.filter_jit(eqx.filter_value_and_grad(mean))(model))


@pytest.fixture(scope="module")
def problem():
    """A model, texts, and their plain loss and gradient."""
    sizes = {"vocab": 64, "embed": 32, "layers": 2, "heads": 4, "mlp": 64}
    model = zoo.models.Transformer(**sizes, key=jax.random.key(0))
    texts, masks = make_texts()
    return model, texts, masks, compute_plainly(model, texts, masks)


@pytest.mark.parametrize(
    ("mesh", "pack"),
    [
        ("data 2 x fsdp 2 x tensor 2", True),
        pytest.param("data 2 x fsdp 2 x tensor 2", False, marks=pytest.mark.ci),
        pytest.param("one device", True, marks=pytest.mark.ci),
    ],
)
def test_loss_is_the_mean_over_all_trained_tokens(problem, mesh, pack):
    model, texts, masks, (expected_loss, expected) = problem
    batch = make_batch(texts, masks, 39, pack=pack, rows=8 if pack else 16)
    trained = batch["weights"].sum(axis=1)
    assert trained.min() <= 1 and trained.max() >= 30 and trained.sum() == sum(TRAINED)
    loss, grads = compute(model, batch, mesh)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert optax.tree.norm(grads) == pytest.approx(float(optax.tree.norm(expected)), rel=1e-5)
    for found, plain in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, plain, atol=1e-5 * np.linalg.norm(plain), rtol=0)


@pytest.mark.skipif(not PARITY.exists(), reason="ZOO_PARITY names no folder")
@pytest.mark.parametrize(
    ("name", "mesh", "seq_len", "pack", "rows"),
    [
        ("sft", "one device", 23, False, 16),
        ("sft", "data 2 x fsdp 2 x tensor 2", 23, False, 16),
        ("sft_all_tokens", "data 2 x fsdp 2 x tensor 2", 23, False, 16),
        ("sft_packed", "one device", 16 * 24, True, 1),
        ("sft_packed", "data 2 x fsdp 2 x tensor 2", 64, True, 8),
        pytest.param("sft_packed", "fsdp 2 x context 2 x tensor 2", 64, True, 8, marks=pytest.mark.ci),
        pytest.param("sft_all_tokens", "fsdp 2 x context 2 x tensor 2", 24, False, 16, marks=pytest.mark.ci),
    ],
)
def test_loss_is_that_of_trl(name, mesh, seq_len, pack, rows):
    expected = json.loads((PARITY / "losses.json").read_text())["losses"][name]
    stored = load_file(PARITY / "batches.safetensors")
    used = stored["pairs/attention_mask"].astype(bool)
    texts = [ids[is_used] for ids, is_used in zip(stored["pairs/input_ids"], used, strict=True)]
    masks = [mask[is_used] for mask, is_used in zip(stored["pairs/completion_mask"], used, strict=True)]
    if name == "sft_all_tokens":
        masks = [np.ones_like(mask) for mask in masks]
    batch = make_batch(texts, masks, seq_len, pack=pack, rows=rows)
    loss, grads = compute(zoo.load(PARITY / "policy", dtype="float32"), batch, mesh)
    assert loss == pytest.approx(expected["loss"], rel=1e-5)
    assert optax.tree.norm(grads) == pytest.approx(expected["gradient_norm"], rel=1e-5)
