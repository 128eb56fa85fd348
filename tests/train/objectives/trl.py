"""Losses of TRL's trainers as ours: their inputs as packed rows, and one program for many losses.

The environment variable ZOO_PARITY names a folder with the values.
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

FOLDER = Path(os.environ.get("ZOO_PARITY", "")) / "posttraining"
needs_parity = pytest.mark.skipif(not FOLDER.exists(), reason="ZOO_PARITY names no folder")
TOLERANCE = 1e-5
MESHES = {
    "one device": ({}, 1, 1),
    "data 2 x fsdp 2 x tensor 2": ({"data": 2, "fsdp": 2, "tensor": 2}, 8, 1),
    "fsdp 2 x context 2 x tensor 2": ({"data": 1, "fsdp": 2, "context": 2, "tensor": 2}, 8, 1),
    "two micro-batches": ({"data": 2, "tensor": 2}, 4, 2),
}
"""Sizes, devices, micro-batches."""
on_each_mesh = pytest.mark.parametrize(
    "mesh_name",
    [
        "one device",
        pytest.param("fsdp 2 x context 2 x tensor 2", marks=pytest.mark.ci),
        pytest.param("two micro-batches", marks=pytest.mark.ci),
        pytest.param("data 2 x fsdp 2 x tensor 2", marks=pytest.mark.slow),
    ],
)


def read_values():
    return json.loads((FOLDER / "losses.json").read_text())["losses"]


def read_arrays(prefix):
    arrays = load_file(FOLDER / "batches.safetensors")
    return {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}


def make_rows(ids, attention, trained, seq_len, texts_per_item=1):
    """Texts, each with its mask of trained tokens, as rows of a batch: one text each, or one pair."""
    is_real = attention.astype(bool)
    texts = [row[real] for row, real in zip(ids, is_real, strict=True)]
    masks = [row[real] for row, real in zip(trained, is_real, strict=True)]
    starts = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
    options = {"texts_per_item": texts_per_item, "too_long": "drop", "pack": False}
    rows = train.PackedRows(np.concatenate(texts), np.concatenate(masks), starts, seq_len, **options)
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def make_pair_rows(seq_len=48):
    """The eight preference pairs of the values, a row each."""
    names = ("input_ids", "attention_mask", "completion_mask")
    pairs = read_arrays("pairs/")
    texts = [np.stack([x[:8], x[8:]], axis=1).reshape(16, -1) for x in (pairs[name] for name in names)]
    return make_rows(*texts, seq_len, texts_per_item=2)


def find_errors(compute_losses, expected, model, batch, mesh_name, *rest):
    """Return the relative errors of value and gradient norm, by the name of the loss.

    - `compute_losses`: `(model, batch, *rest) -> {name: (total, count)}`.
    - `rest`: models and modules, placed on the mesh.
    """
    sizes, devices, microbatches = MESHES[mesh_name]
    mesh = zoo.make_mesh(**sizes, devices=jax.devices()[:devices])

    def loss_fn(model, batch, choice, *rest):
        losses = compute_losses(model, batch, *rest)
        assert set(losses) == set(expected)
        totals = [losses[name][0] * is_chosen for name, is_chosen in choice.items()]
        counts = [losses[name][1] * is_chosen for name, is_chosen in choice.items()]
        return sum(totals), sum(counts)

    @eqx.filter_jit
    def run(model, batch, choice, *rest):
        loss, grads = zoo.value_and_grad(loss_fn, mesh, microbatches=microbatches)(model, batch, choice, *rest)
        return loss, optax.tree.norm(grads)

    model = zoo.place(model, mesh)
    batch = zoo.place_batch(batch, mesh)
    rest = tuple(place_rest(x, mesh) for x in rest)
    errors = {}
    for name, wanted in expected.items():
        choice = {other: jnp.float32(other == name) for other in expected}
        loss, norm = map(float, run(model, batch, choice, *rest))
        loss_error = abs(loss - wanted["loss"]) / max(abs(wanted["loss"]), 1)
        errors[name] = max(loss_error, abs(norm - wanted["gradient_norm"]) / wanted["gradient_norm"])
    return errors


def place_rest(x, mesh):
    """Place a frozen model by its annotations, and anything else as a batch."""
    if isinstance(x, zoo.models.Decoder):
        return zoo.place(x, mesh)
    return zoo.place_batch(x, mesh)
