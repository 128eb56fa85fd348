"""Hold every language model that reads images to PyTorch: tower, features, activations, gradients, padding, decoding,
files.

The meta.json of a case names the versions of transformers and PyTorch that wrote it, and how its images are shared out
among the rows.
"""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.models.encoders import packed_cases
from tests.quick import mark_slow
from tests.tools.parity.test_checkpoint import (
    check_hub_config_loads_the_same_model,
    check_saved_files_equal_loaded_files,
)
from tests.weights.test_families_on_meshes import adapt, compare_meshes
from zoo.layers.token_info import TokenInfo, token_info
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.wrappers import WRAPPERS
from zoo.tools.parity.checkpoint import compare_checkpoint, make_loss, read_expectations

FIXTURES = Path(__file__).parents[2] / "fixtures" / "image_text"
PARITY = os.environ.get("ZOO_PARITY")
QUICK = ("gemma3_image",)
IMAGE = 73
"""Token id of the features of images in all cases."""


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def list_cases() -> list[Path]:
    """The fixtures, and the cases that ZOO_PARITY has besides."""
    folders = sorted(FIXTURES.iterdir())
    names = {folder.name for folder in folders}
    if PARITY:
        more = sorted(x for x in (Path(PARITY) / "models_vision").iterdir() if x.is_dir() and x.name not in names)
        kinds = {x: (read(x / "meta.json")["kind"], read(x / "config.json")["model_type"]) for x in more}
        folders += [x for x, (kind, name) in kinds.items() if kind == "image_text" and name in FAMILIES]
    return folders


def name_of(folder: Path) -> str:
    return folder.name


CASES = mark_slow(list_cases(), but=QUICK, name=name_of)
FIRST = [folder for folder in list_cases() if folder.name in QUICK]


def share_out(x: np.ndarray, counts: list[int]) -> np.ndarray:
    """Return entries, some for each row, as rows of equal length with zeros at their ends."""
    rows = np.zeros((len(counts), max(counts), *x.shape[1:]), x.dtype)
    for row, part in zip(rows, np.split(x, np.cumsum(counts)[:-1]), strict=True):
        row[: len(part)] = part
    return rows


def read_case(folder: Path) -> dict[str, np.ndarray]:
    """Return the expectations of a case with images rows first, and spans in place of types of tokens."""
    expected = dict(read_expectations(folder / "expected.safetensors"))
    rows_of = read(folder / "meta.json")["rows_of"]
    if expected.keys() & {"image_grid_thw", "video_grid_thw", "image_sizes", "image_position_ids"}:
        images = packed_cases.read_images(expected, rows_of)
        arrays = {"pixel_values": images.pixels, "image_grid_thw": images.grids, "seconds": images.seconds}
        expected |= {name: np.asarray(x) for name, x in arrays.items() if x is not None}
        expected["image_features"] = expected.get("video_features", expected.get("image_features"))
    elif "pixel_attention_mask" not in expected:
        expected["pixel_values"] = share_out(expected["pixel_values"], rows_of["pixel_values"])
    if "position_ids" in expected and expected["position_ids"].ndim == 3:
        expected["coordinates"] = np.moveaxis(expected["position_ids"], 0, -1)
    for number, features in enumerate(take(expected, "deepstack_features.")):  # added after the layer's output
        states = np.copy(expected[f"hidden_states.{number + 1}"])
        states[expected["input_ids"] == IMAGE] += features
        expected[f"hidden_states.{number + 1}"] = states
    if folder.name.startswith("paligemma"):
        expected["spans"] = 1 - expected["token_type_ids"]
        expected["padleft.spans"] = (1 - expected["padleft.token_type_ids"]) * expected["padleft.attention_mask"]
    return expected


def take(expected: dict, beginning: str) -> list[np.ndarray]:
    """Return the expectations that are named so and numbered."""
    return [x for name, x in sorted(expected.items()) if name.startswith(beginning)]


def read_images(folder: Path, expected: dict) -> object:
    return make_loss(zoo.load(folder), expected)[1]["images"]


@pytest.mark.one_case
@pytest.mark.parametrize("folder", CASES, ids=name_of)
def test_image_texts_match_pytorch(folder: Path, tmp_path: Path):
    expected = read_case(folder)
    meta = read(folder / "meta.json")
    without = set(meta.get("without_gradient", ()))
    norms = {name: norm for name, norm in meta["grad_norm"].items() if name not in without}
    report = compare_checkpoint(folder, expected, gradient_norms=norms)
    assert report.passed, report.first_failure
    lines = {line.name for line in report.comparisons}
    assert {"image_features", "text: embedding", "text: logits", "loss"} <= lines
    assert sum("gradient of" in line for line in lines) == len(norms)
    model = zoo.load(folder)
    if (folder / "config_hub.json").exists():
        model = check_hub_config_loads_the_same_model(folder, tmp_path / "hub")
    check_saved_files_equal_loaded_files(model, folder, tmp_path / "again")


@pytest.mark.parametrize("folder", CASES, ids=name_of)
def test_rows_with_padding_equal_rows_alone(folder: Path):
    """Logits of rows that are padded on the left, and greedy tokens."""
    expected, model = read_case(folder), zoo.load(folder)
    images = read_images(folder, expected)
    expected |= {name: jnp.asarray(x) for name, x in expected.items() if "padleft." in name or "prompt" in name}
    mask = expected["padleft.attention_mask"] > 0
    logits = model(expected["padleft.input_ids"], images, mask=mask, spans=expected.get("padleft.spans"))
    for row, count in enumerate(mask.sum(1)):
        whole = expected["logits"][row, :count]
        wanted = expected["padleft.logits"][row, -count:] if "padleft.logits" in expected else whole
        assert np.abs(np.asarray(logits)[row, -count:] - wanted).max() <= 1e-4 * np.abs(wanted).max(), row
    for name in ("generate", "generate_padleft"):
        prompt, wanted = expected[f"{name}.prompt"], expected[f"{name}.tokens"]
        mask = expected[f"{name}.attention_mask"] > 0 if f"{name}.attention_mask" in expected else None
        new = zoo.generate(model, prompt, images=images, mask=mask, max_new_tokens=wanted.shape[1])
        np.testing.assert_array_equal(new, wanted)


@pytest.mark.parametrize("folder", CASES, ids=name_of)
def test_a_mesh_equals_one_device(folder: Path):
    """With LoRA, in loss and gradients; and in greedy tokens."""
    expected, model = read_case(folder), zoo.load(folder, dtype=jnp.float32)
    loss_fn, batch = make_loss(model, expected)
    batch = jax.tree.map(lambda x: np.concatenate([x, x[::-1], x[:2]]), batch)
    compare_meshes(adapt(model), batch, batch, loss_fn)
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    prompt = jnp.concatenate([expected["generate.prompt"]] * 2)
    images = jax.tree.map(lambda x: np.concatenate([x, x]), read_images(folder, expected))
    wanted = np.concatenate([expected["generate.tokens"][:, :6]] * 2)
    new = zoo.generate(zoo.place(model, mesh), prompt, images=images, mesh=mesh, max_new_tokens=6)
    np.testing.assert_array_equal(new, wanted)


SEEN_ON_AXES = [folder for folder in list_cases() if folder.name.startswith("qwen")]


@pytest.mark.parametrize("folder", SEEN_ON_AXES, ids=name_of)
def test_positions_are_those_of_pytorch(folder: Path):
    """Of texts with images, padded on the left as well, and of the last token that is generated."""
    expected, model = read_case(folder), zoo.load(folder)
    images = read_images(folder, expected)
    info = model.place_images(jnp.asarray(expected["input_ids"]), images, TokenInfo())
    np.testing.assert_array_equal(info.coordinates, expected["coordinates"])
    mask = expected["padleft.attention_mask"] > 0
    tokens = jnp.asarray(expected["padleft.input_ids"])
    info = model.place_images(tokens, images, token_info(tokens, mask=jnp.asarray(mask)))
    wanted = np.moveaxis(expected["padleft.position_ids"], 0, -1)
    np.testing.assert_array_equal(np.asarray(info.coordinates)[mask], wanted[mask])


@pytest.mark.parametrize("folder", FIRST, ids=name_of)
def test_context_is_refused(folder: Path):
    model = zoo.load(folder, dtype=jnp.float32)
    loss_fn, batch = make_loss(model, read_case(folder))
    mesh = zoo.make_mesh(context=2, devices=jax.devices()[:2])
    with pytest.raises(NotImplementedError, match="take context=1"):
        zoo.value_and_grad(loss_fn, mesh)(zoo.place(model, mesh), zoo.place_batch(batch, mesh))


@pytest.mark.parametrize("folder", CASES, ids=name_of)
def test_the_language_model_is_read_alone(folder: Path):
    """Without images it computes what the whole does for a text, to the bit."""
    if read(folder / "config.json")["model_type"] not in WRAPPERS:
        pytest.skip("its language model is not read by itself")
    alone, whole = zoo.load(folder, images=False), zoo.load(folder)
    tokens = jnp.asarray(read_case(folder)["input_ids"][2:])
    np.testing.assert_array_equal(alone(tokens), whole.decoder(tokens))
    if not whole.places.reads_ahead:
        np.testing.assert_array_equal(alone(tokens), whole(tokens))
