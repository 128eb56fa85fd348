"""Directories of sentence-transformers: read, embedded as they say, written back; damaged ones are refused."""

import json
import logging
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import zoo

FIXTURES = Path(__file__).parents[1] / "fixtures"
FIXTURE = FIXTURES / "encoders" / "bert_features"
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}


def make_directory(folder, *more, **config):
    shutil.copytree(FIXTURE, folder)
    (folder / "modules.json").write_text(json.dumps([TRANSFORMER, POOLING, *more], indent=1))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("folder", sorted((FIXTURES / "embeddings").iterdir()), ids=lambda folder: folder.name)
def test_embeddings_equal_those_of_sentence_transformers(folder, tmp_path):
    """Of texts padded on the right, as its tokenizer does, and on the left."""
    expected, model = load_file(folder / "expected.safetensors"), zoo.load(folder)
    tokens, mask = expected["input_ids"], expected["attention_mask"] > 0
    order = np.argsort(mask, axis=1, kind="stable")  # padding first
    left = [np.take_along_axis(x, order, axis=1) for x in (tokens, mask)]
    for rows in ((tokens, mask), left):
        np.testing.assert_allclose(zoo.embed(model, *map(jnp.asarray, rows)), expected["embeddings"], atol=2e-6)
    zoo.save(model, tmp_path)
    written = {file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()}
    assert written >= {file.relative_to(folder) for file in folder.rglob("*.json")}
    for file in written - {Path("config.json"), Path("README.md")}:
        assert (tmp_path / file).read_bytes() == (folder / file).read_bytes(), file


def test_sentence_files_make_a_round_trip(tmp_path):
    modes = dict.fromkeys(("pooling_mode_cls_token", "pooling_mode_mean_tokens"), True)
    folder = make_directory(tmp_path / "in", NORMALIZE, word_embedding_dimension=16, **modes)
    model, tokens = zoo.load(folder), jnp.arange(1, 13).reshape(2, 6)
    states = np.asarray(model(tokens).last_hidden_state, np.float64)
    expected = np.concatenate([states[:, 0], states.mean(1)], axis=-1)
    expected /= np.linalg.norm(expected, axis=-1, keepdims=True)
    np.testing.assert_allclose(zoo.embed(model, tokens), expected, atol=1e-5)
    zoo.save(model, tmp_path / "out")
    for file in ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (folder / file).read_bytes()
    np.testing.assert_array_equal(zoo.embed(zoo.load(tmp_path / "out"), tokens), zoo.embed(model, tokens))
    wrong = zoo.load(make_directory(tmp_path / "wrong", word_embedding_dimension=20))
    with pytest.raises(ValueError, match="pools 20 features of a token, and the model has 16"):
        zoo.embed(wrong, tokens)


def test_modules_with_weights_are_not_saved_without_them(tmp_path, caplog):
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    model = zoo.load(make_directory(tmp_path / "in", dense))
    with pytest.raises(ValueError, match="has the modules Transformer, Pooling, Dense"):
        zoo.embed(model, jnp.ones((1, 4), int))
    with caplog.at_level(logging.WARNING, logger="zoo"):
        zoo.save(model, tmp_path / "out")
    assert "modules.json is not saved" in caplog.text and not (tmp_path / "out" / "modules.json").exists()
    assert zoo.load(tmp_path / "out").origin.sentence_files == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("{}", "a list of modules"),
        ('[{"type": 1, "path": ""}]', "a list of modules"),
        ('[{"type": "a", "path": "../b"}]', "'../b' is not a folder in this directory"),
        ('[{"type": "a", "path": ".."}]', "'..' is not a folder in this directory"),
    ],
)
def test_damaged_modules_are_refused(tmp_path, text, message):
    folder = make_directory(tmp_path / "in")
    (folder / "modules.json").write_text(text)
    with pytest.raises(zoo.CheckpointError, match=message):
        zoo.load(folder)
