"""Decoders that score texts equal transformers on reference cases, and their files are read and written."""

import json
import re
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import zoo
from zoo import train
from zoo.models import SequenceScore, Transformer
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.score_head import has_score, score_family
from zoo.weights.to_torch import list_state

FIXTURES = Path(__file__).parents[2] / "fixtures" / "scores"
MODELS = Path(__file__).parents[2] / "fixtures" / "models"


def read(path):
    return json.loads(path.read_text())


def write(folder, config, tensors):
    """Write a checkpoint without ceremony."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def have_equal_arrays(first, second):
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def make_score(classes=3, **options):
    decoder = Transformer(vocab=64, embed=32, layers=2, heads=4, mlp=64, key=jax.random.key(0), **options)
    return SequenceScore.from_decoder(decoder, classes, key=jax.random.key(1))


@eqx.filter_jit
@eqx.filter_value_and_grad(has_aux=True)
def compute(model, expected):
    """The loss of a case, and its scores by the side of the padding. For a reward model the first text is the better
    one."""
    sides = ("right", "left")
    scores = {side: model(expected[f"{side}.input_ids"], mask=expected[f"{side}.attention_mask"] > 0) for side in sides}
    if scores["right"].shape[-1] == 1:
        return train.objectives.pairwise_reward(*scores["right"]).sum(), scores
    return zoo.models.token_losses(scores["right"], expected["labels"]).mean(), scores


@pytest.mark.one_case
@pytest.mark.parametrize("folder", sorted(FIXTURES.iterdir()), ids=lambda folder: folder.name)
def test_scores_gradients_and_files_are_those_of_transformers(folder: Path, tmp_path: Path):
    expected = load_file(folder / "expected.safetensors")
    model = zoo.load(folder)
    assert isinstance(model, SequenceScore)
    (loss, scores), grads = compute(model, expected)
    for side, found in scores.items():
        wanted = expected[f"{side}.logits"]
        np.testing.assert_allclose(found, wanted, atol=1e-5 * float(np.abs(wanted).max()), rtol=0, err_msg=side)
    np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5)
    zoo.save(grads, tmp_path / "gradient")
    found = load_file(tmp_path / "gradient" / "model.safetensors")
    wanted = {key.removeprefix("grad."): x for key, x in expected.items() if key.startswith("grad.")}
    assert found.keys() == wanted.keys()
    largest = max(float(np.linalg.norm(x)) for x in wanted.values())
    for name, x in wanted.items():
        np.testing.assert_allclose(found[name], x, atol=1e-5 * largest, rtol=0, err_msg=name)

    stored = load_file(folder / "model.safetensors")
    zoo.save(model, tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(saved[name].tobytes() == x.tobytes() for name, x in stored.items())
    assert read(tmp_path / "again" / "config.json") == read(folder / "config.json")
    state = list_state(model, None, "module")
    assert not state.copies and "score.weight" in state.tensors  # no tied head
    converted = zoo.from_torch(stored, read(folder / "config.json"))
    assert have_equal_arrays(converted, model)


def test_a_model_from_scratch_finds_its_family(tmp_path: Path):
    model = make_score(5, tied=True)
    zoo.save(model, tmp_path / "a", config={"pad_token_id": 0})
    config = read(tmp_path / "a" / "config.json")
    assert config["architectures"] == ["LlamaForSequenceClassification"] and config["pad_token_id"] == 0
    assert list(config["id2label"].values()) == list(config["label2id"]) == [f"LABEL_{n}" for n in range(5)]
    assert "AutoModelForSequenceClassification" in (tmp_path / "a" / "README.md").read_text()
    assert load_file(tmp_path / "a" / "model.safetensors")["score.weight"].shape == (5, 32)
    assert have_equal_arrays(zoo.load(tmp_path / "a"), model)
    labels = dict(enumerate("abcde"))
    zoo.save(model, tmp_path / "b", family="mistral", config={"id2label": labels})
    config = read(tmp_path / "b" / "config.json")
    assert config["architectures"] == ["MistralForSequenceClassification"]
    assert list(config["id2label"].values()) == list(config["label2id"]) == list("abcde")
    with pytest.raises(zoo.CheckpointError, match=r"score\.weight has the shape \[5, 32\], not \[2, 32\]"):
        zoo.save(model, tmp_path / "c", family="mistral", config={"id2label": {0: "a", 1: "b"}})
    with pytest.raises(zoo.CheckpointError, match=r"transformers has no GraniteForSequenceClassification\. Texts are"):
        zoo.save(model, tmp_path / "c", family="granite")
    with pytest.raises(zoo.CheckpointError, match="qwen3: .*query_norm is None, not RMSNorm"):
        zoo.save(model, tmp_path / "c", family="qwen3")
    assert not (tmp_path / "c").exists()


def test_a_language_model_keeps_its_config_and_loses_its_head(tmp_path: Path):
    """Untied, tied, in a multimodal checkpoint, and with labels of its own."""
    for name in ("llama", "gpt2", "gemma3_text"):
        decoder = zoo.load(MODELS / name)
        model = SequenceScore.from_decoder(decoder, 4, key=jax.random.key(0))
        zoo.save(model, tmp_path / name)
        before = read(MODELS / name / "config.json")
        after = read(tmp_path / name / "config.json")
        assert after["architectures"] == [score_family(FAMILIES[name]).architecture]
        assert {key for key in before if after.get(key) != before[key]} <= {"architectures", "id2label", "label2id"}
        tensors = load_file(tmp_path / name / "model.safetensors")
        assert tensors.pop("score.weight").shape[0] == 4 and "lm_head.weight" not in tensors
        for key, x in load_file(MODELS / name / "model.safetensors").items():
            assert key == "lm_head.weight" or np.array_equal(tensors.pop(key), x)
        assert not tensors
        assert have_equal_arrays(zoo.load(tmp_path / name), model)
    granite = SequenceScore.from_decoder(zoo.load(MODELS / "granite"), key=jax.random.key(0))
    with pytest.raises(zoo.CheckpointError, match="transformers has no GraniteForSequenceClassification"):
        zoo.save(granite, tmp_path / "granite")


def test_classes_are_counted_as_transformers_does(tmp_path: Path):
    config = read(FIXTURES / "gpt2" / "config.json")
    tensors = load_file(FIXTURES / "gpt2" / "model.safetensors")
    plain = {key: x for key, x in config.items() if key not in ("id2label", "label2id")}
    assert zoo.load(write(tmp_path / "count", {**plain, "num_labels": 3}, tensors)).score.out_size == 3
    two = {**tensors, "score.weight": tensors["score.weight"][:2]}
    assert zoo.load(write(tmp_path / "default", plain, two)).score.out_size == 2
    with pytest.raises(zoo.CheckpointError, match="num_labels = 4, and id2label has 3 labels"):
        zoo.load(write(tmp_path / "differ", {**config, "num_labels": 4}, tensors))
    with pytest.raises(zoo.CheckpointError, match=r"score\.weight is \[2, 16\] in the file, and the config asks for"):
        zoo.load(write(tmp_path / "size", config, two))


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("GPT2ForTokenClassification", {}, "of decoders, heads are read that predict the next token, GPT2LMHeadModel"),
        ("GraniteForSequenceClassification", {"model_type": "granite"}, "has no GraniteForSequenceClassification"),
        (
            "Gemma3ForSequenceClassification",
            {"model_type": "gemma3", "text_config": {}},
            "a multimodal model that scores texts is not read.*Gemma3TextForSequenceClassification",
        ),
    ],
)
def test_other_heads_are_refused_by_name(tmp_path: Path, architecture, change, message):
    config = read(FIXTURES / "gpt2" / "config.json") | {"architectures": [architecture], **change}
    tensors = load_file(FIXTURES / "gpt2" / "model.safetensors")
    folder = write(tmp_path / "other", config, tensors)
    with pytest.raises(zoo.CheckpointError, match=message):
        zoo.load(folder)
    with pytest.raises(zoo.CheckpointError, match=message):
        zoo.from_torch(tensors, config)


def test_families_with_a_score_have_decoders_and_are_listed():
    scored = {name: family for name, family in FAMILIES.items() if has_score(family)}
    assert len(scored) > 50 and {"llama", "qwen3", "gpt2", "zamba2"} <= scored.keys()
    for name, family in scored.items():
        with_score = score_family(family)
        assert with_score is score_family(family) is score_family(with_score)
        assert with_score.architecture.endswith("ForSequenceClassification") and with_score.name == name
        assert "architectures" not in family.defaults and "architectures" in with_score.defaults
    page = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text().partition("of decoders\n")[2]
    listed = re.findall(r"`([a-z0-9_]+)`", page.partition("For other families")[0])
    assert sorted(listed) == sorted(scored)
