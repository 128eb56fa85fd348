"""Compare encoders with PyTorch on reference cases: activations with padding, outputs, gradients, saving."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import zoo
from tests.quick import mark_slow
from tests.tools.parity.test_checkpoint import (
    check_hub_config_loads_the_same_model,
    check_saved_files_equal_loaded_files,
    list_case_folders,
    read,
)
from zoo.models import Encoder, TwoTowers
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.spec import replace_ending
from zoo.models.scoring import unstack_blocks
from zoo.tools.parity.checkpoint import OUTPUTS as RESULTS
from zoo.tools.parity.checkpoint import compare_checkpoint, read_expectations
from zoo.weights.safetensors import CheckpointError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "encoders"
QUICK = ("bert_texts", "deberta_masked", "dinov3_features")
OUTPUTS = ("modernbert_tokens", "vit_classes")
"""With QUICK, a case of each head, on layers that have least in common: `test_outputs_and_files_match_pytorch` takes
them without the layers alone and gradients."""
NAME = lambda folder: folder.name
REFERENCES = list_case_folders("encoder")
TEXTS = [folder for folder in REFERENCES if "vocab_size" in read(folder / "config.json")]
CASES = mark_slow([*sorted(FIXTURES.iterdir()), *REFERENCES], but=QUICK, name=NAME)


@pytest.mark.one_case
@pytest.mark.parametrize("folder", CASES, ids=NAME)
def test_encoders_match_pytorch(folder: Path, tmp_path: Path):
    expected, norms = read_expectations(folder / "expected.safetensors"), read(folder / "meta.json")["grad_norm"]
    report = compare_checkpoint(folder, expected, gradient_norms=norms)
    assert report.passed, report.first_failure
    results = {*RESULTS, "loss"} & expected.keys()
    assert results and results <= {line.name for line in report.comparisons}
    model = zoo.load(folder)
    towers = (model.text, model.image) if isinstance(model, TwoTowers) else (model,)
    layers = sum(len(unstack_blocks(tower)) for tower in towers)
    states = sum("hidden_states." in name for name in expected) - (len(towers) - 1)  # one is before the final norm
    assert states >= layers
    assert len(report.comparisons) >= states + len(results) + len(norms)
    if (folder / "config_hub.json").exists():
        model = check_hub_config_loads_the_same_model(folder, tmp_path / "hub")
    check_saved_files_equal_loaded_files(model, folder, tmp_path / "again")


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_and_files_match_pytorch(name: str, tmp_path: Path):
    expected = read_expectations(FIXTURES / name / "expected.safetensors")
    kept = {key: x for key, x in expected.items() if key != "loss" and not key.startswith(("hidden_states.", "grad."))}
    report = compare_checkpoint(FIXTURES / name, kept)
    assert report.passed, report.first_failure
    assert [line.name for line in report.comparisons] == ["logits"]
    check_saved_files_equal_loaded_files(zoo.load(FIXTURES / name), FIXTURES / name, tmp_path)


@pytest.mark.parametrize("folder", [pytest.param(x, id=x.name, marks=pytest.mark.slow) for x in TEXTS])
def test_padding_of_texts_matches_pytorch(folder: Path):
    """On the left and on the right."""
    expected, model = read_expectations(folder / "expected.safetensors"), zoo.load(folder, dtype=jnp.float32)
    assert isinstance(model, Encoder)
    for side in ("padleft", "padright"):
        mask = expected[f"{side}.attention_mask"] > 0
        logits = model(jnp.asarray(expected[f"{side}.input_ids"]), mask=jnp.asarray(mask))
        wanted = expected[f"{side}.logits"]
        assert np.abs(np.asarray(logits) - wanted)[mask].max() <= 1e-4 * np.abs(wanted).max(), side


def test_published_bert_names_are_read_and_written(tmp_path: Path):
    """Norms of the first published files are called gamma and beta, and files have heads that the config does not."""
    folder = FIXTURES / "bert_masked"
    tensors = load_file(folder / "model.safetensors")
    older = {new: old for old, new in FAMILIES["bert"].older_endings.items()}
    published = {replace_ending(name, older): x for name, x in tensors.items()}
    assert sum(name.endswith("LayerNorm.gamma") for name in published) == 6
    published["cls.seq_relationship.weight"] = np.ones((2, 16), np.float32)
    save_file(published, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    model = zoo.load(tmp_path)
    for x, y in zip(jax.tree.leaves(model), jax.tree.leaves(zoo.load(folder)), strict=True):
        np.testing.assert_array_equal(x, y)
    zoo.save(model, tmp_path / "again", source=tmp_path)
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert saved.keys() == published.keys()
    assert all(saved[name].tobytes() == published[name].tobytes() for name in saved)
    name = "bert.embeddings.LayerNorm"
    save_file(published | {f"{name}.weight": np.ones(16, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}\.gamma and {name}\.weight are one tensor, by two names"):
        zoo.load(tmp_path)


def test_published_albert_is_read_and_written(tmp_path: Path):
    """Files have the pooler and the head of sentence orders, too, and configs keys of the paper's code."""
    folder = FIXTURES / "albert_masked"
    rows = {"albert.pooler": 16, "sop_classifier.classifier": 2}
    published = load_file(folder / "model.safetensors")
    for name, size in rows.items():
        published |= {f"{name}.weight": np.ones((size, 16), np.float32), f"{name}.bias": np.ones(size, np.float32)}
    published["predictions.decoder.bias"] = published["predictions.bias"]
    save_file(published, tmp_path / "model.safetensors")
    config = read(folder / "config.json")
    older = {"down_scale_factor": 1, "gap_size": 0, "net_structure_type": 0, "num_memory_blocks": 0}
    (tmp_path / "config.json").write_text(json.dumps(config | older))
    model = zoo.load(tmp_path)
    for x, y in zip(jax.tree.leaves(model), jax.tree.leaves(zoo.load(folder)), strict=True):
        np.testing.assert_array_equal(x, y)
    zoo.save(model, tmp_path / "again", source=tmp_path)
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert saved.keys() == published.keys() - {"predictions.decoder.bias"}
    assert all(saved[name].tobytes() == published[name].tobytes() for name in saved)

    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 64}))
    assert len(model.stack.segments) == 1 and zoo.load(tmp_path).stack.count_layers() == 64 > len(published)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_groups": 5}))
    with pytest.raises(zoo.CheckpointError, match=r"num_hidden_groups = 5, and num_hidden_layers = 4 are too few"):
        zoo.load(tmp_path)


def test_copies_of_the_tied_head_are_read_and_checked(tmp_path: Path):
    """Modules in memory and older files have one."""
    folder = FIXTURES / "bert_masked"
    tensors = load_file(folder / "model.safetensors")
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    for x, y in zip(jax.tree.leaves(zoo.load(tmp_path)), jax.tree.leaves(zoo.load(folder)), strict=True):
        np.testing.assert_array_equal(x, y)
    save_file(
        tensors | {"cls.predictions.decoder.weight": np.ones((40, 16), np.float32)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(zoo.CheckpointError, match="says that they are tied"):
        zoo.load(tmp_path)
