"""Hold every family with an encoder and a decoder to PyTorch: activations, gradients, padding, decoding, files.

The meta.json of a case names the versions of transformers and PyTorch that wrote it.
"""

import dataclasses
import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.quick import mark_slow
from tests.tools.parity.test_checkpoint import (
    check_hub_config_loads_the_same_model,
    check_saved_files_equal_loaded_files,
)
from tests.weights.test_families_on_meshes import adapt, compare_meshes
from zoo.models.hf.families import FAMILIES
from zoo.tools.parity.checkpoint import compare_checkpoint, make_loss, read_expectations

FIXTURES = Path(__file__).parents[2] / "fixtures" / "encoder_decoders"
PARITY = os.environ.get("ZOO_PARITY")
QUICK = ("t5_relu_tied",)


def list_cases() -> list[Path]:
    """The fixtures, and the cases that ZOO_PARITY has besides."""
    folders = sorted(FIXTURES.iterdir())
    names = {folder.name for folder in folders}
    if PARITY:
        more = (Path(PARITY) / "models_encdec").iterdir()
        folders += [x for x in sorted(more) if x.is_dir() and x.name not in names and model_type(x) in FAMILIES]
    return folders


def model_type(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["model_type"]


def name_of(folder: Path) -> str:
    return folder.name


CASES = mark_slow(list_cases(), but=QUICK, name=name_of)
FIRST = [folder for folder in list_cases() if folder.name in QUICK]


@pytest.mark.one_case
@pytest.mark.parametrize("folder", CASES, ids=name_of)
def test_encoder_decoders_match_pytorch(folder: Path, tmp_path: Path):
    expected = read_expectations(folder / "expected.safetensors")
    meta = json.loads((folder / "meta.json").read_text())
    report = compare_checkpoint(folder, expected, gradient_norms=meta["grad_norm"])
    assert report.passed, report.first_failure
    lines = {line.name for line in report.comparisons}
    assert {"encoder: embedding", "decoder: embedding", "decoder: logits", "loss"} <= lines
    assert sum(": layer" in line for line in lines) == sum("hidden_states." in name for name in expected) - 2
    assert sum("gradient of" in line for line in lines) == len(meta["grad_norm"])
    model = zoo.load(folder)
    if (folder / "config_hub.json").exists():
        model = check_hub_config_loads_the_same_model(folder, tmp_path / "hub")
    check_saved_files_equal_loaded_files(model, folder, tmp_path / "again")


@pytest.mark.parametrize("folder", CASES, ids=name_of)
def test_rows_with_padding_equal_rows_alone(folder: Path):
    """Logits and greedy tokens, with padding of the source on either side, and the loss with a shorter target."""
    expected, model = read_expectations(folder / "expected.safetensors"), zoo.load(folder)
    source = expected["input_ids" if model.reads_tokens else "input_features"]
    check = lambda tokens, wanted: np.testing.assert_array_equal(tokens, wanted[:, len(model.start) - 1 :])
    count = expected["generate.tokens"].shape[1]
    check(zoo.generate(model, source, max_new_tokens=count), expected["generate.tokens"])
    shorter = {model.source_key: source, "tokens": expected["decpad.decoder_input_ids"]}
    total, weight = zoo.cross_entropy(model, {**shorter, "targets": expected["decpad.labels"].astype(np.int32)})
    np.testing.assert_allclose(total / weight, expected["decpad.loss"], rtol=1e-5)
    for side in [side for side in ("padleft", "padright") if f"{side}.input_ids" in expected]:
        padded, mask = expected[f"{side}.input_ids"], expected[f"{side}.attention_mask"] > 0
        logits = model(padded, expected["decoder_input_ids"], mask=mask)
        wanted = expected["pad.logits"]
        assert np.abs(np.asarray(logits) - wanted).max() <= 1e-4 * np.abs(wanted).max(), side
        new = zoo.generate(model, padded, mask=mask, max_new_tokens=count)
        check(new, expected["generate_encpad.tokens"])


@pytest.mark.parametrize("folder", CASES, ids=name_of)
def test_forced_tokens_are_not_among_the_new_ones(folder: Path):
    expected, model = read_expectations(folder / "expected.safetensors"), zoo.load(folder)
    if "generate_forced.tokens" not in expected:
        pytest.skip("nothing is forced")
    wanted = expected["generate_forced.tokens"]
    forced = dataclasses.replace(model, start=(model.start[0], int(wanted[0, 0])))
    new = zoo.generate(forced, expected["input_ids"], max_new_tokens=wanted.shape[1] - 1)
    np.testing.assert_array_equal(new, wanted[:, 1:])


def make_batch(folder: Path, model) -> tuple:
    """Return the loss of a case and its batch, of eight rows, with padding in the source, and sizes that 2 divides."""
    loss_fn, batch = make_loss(model, read_expectations(folder / "expected.safetensors"))
    batch = {key: np.concatenate([x, x[::-1]] * 2) for key, x in batch.items()}
    batch |= {key: x[:, : x.shape[1] // 4 * 4] for key, x in batch.items() if key != "features"}
    if model.reads_tokens:
        mask = np.ones(batch["source"].shape, bool)
        mask[0, -5:] = False
        mask[2, :3] = False
        batch["source_mask"] = mask
    return loss_fn, batch


@pytest.mark.parametrize("folder", CASES, ids=name_of)
def test_a_mesh_equals_one_device(folder: Path):
    """With LoRA, in loss and gradients; and in greedy tokens."""
    model = zoo.load(folder, dtype=jnp.float32)
    loss_fn, batch = make_batch(folder, model)
    compare_meshes(adapt(model), batch, batch, loss_fn)
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    options = {"mask": batch.get("source_mask"), "max_new_tokens": 6}
    source = batch[model.source_key]
    wanted = zoo.generate(model, source, **options)
    np.testing.assert_array_equal(zoo.generate(zoo.place(model, mesh), source, mesh=mesh, **options), wanted)


@pytest.mark.ci
@pytest.mark.parametrize("folder", FIRST, ids=name_of)
def test_context_equals_one_device(folder: Path):
    """Where both the source and the target are shards on each device."""
    model = zoo.load(folder, dtype=jnp.float32)
    loss_fn, batch = make_batch(folder, model)
    compare_meshes(model, batch, batch, loss_fn, ("data", "context", "tensor"))
    mesh = zoo.make_mesh(data=2, context=2, tensor=2)
    options = {"mask": batch["source_mask"], "max_new_tokens": 6}
    wanted = zoo.generate(model, batch["source"], **options)
    np.testing.assert_array_equal(zoo.generate(zoo.place(model, mesh), batch["source"], mesh=mesh, **options), wanted)
