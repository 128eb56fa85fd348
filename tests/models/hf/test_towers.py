"""Configs within the config of two towers: both are read, and errors name the one that is wrong."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import zoo
from zoo.models.hf.families import FAMILIES
from zoo.models.parameter_paths import find_differences

FIXTURES = Path(__file__).parents[2] / "fixtures" / "encoders"


def copy_with(folder: Path, name: str = "clip_pairs", **changes) -> Path:
    """Copy a case, with these keys of its config replaced; a key of a tower is `text_config__key`."""
    shutil.copytree(FIXTURES / name, folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        place, _, inner = key.rpartition("__")
        (config[place] if place else config)[inner or key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_older_files_have_the_configs_of_towers_twice(tmp_path):
    """The second one counts, as in transformers; null is none."""
    wanted = zoo.load(FIXTURES / "clip_pairs")
    config = json.loads((FIXTURES / "clip_pairs" / "config.json").read_text())
    given = {"text_config_dict": config["text_config"], "text_config": {"hidden_size": 7}, "vision_config_dict": None}
    folder = copy_with(tmp_path / "older", **given)
    model = zoo.load(folder)
    assert not list(find_differences(model, wanted))
    zoo.save(model, tmp_path / "again")
    for name in given:
        read = [json.loads((path / "config.json").read_text())[name] for path in (folder, tmp_path / "again")]
        assert read[0] == read[1]


WRITTEN_BY_TRANSFORMERS_4 = {
    "add_cross_attention": False,
    "architectures": None,
    "bad_words_ids": None,
    "chunk_size_feed_forward": 0,
    "dropout": 0.0,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "is_decoder": False,
    "pruned_heads": {},
    "tie_word_embeddings": True,
    "top_k": 50,
    "torch_dtype": None,
    "use_bfloat16": False,
}


def test_configs_of_towers_that_have_every_key_are_read(tmp_path):
    changes = {}
    for tower in ("text_config", "vision_config"):
        changes |= {f"{tower}__{key}": value for key, value in WRITTEN_BY_TRANSFORMERS_4.items()}
    for name in ("clip_pairs", "chinese_clip_pairs"):
        given = {key: value for key, value in changes.items() if name == "clip_pairs" or not key.endswith("dropout")}
        model = zoo.load(copy_with(tmp_path / name, name, **given))
        assert not list(find_differences(model, zoo.load(FIXTURES / name)))


@pytest.mark.parametrize(
    ("changes", "message"),
    {
        "text": (
            {"text_config__hidden_size": "16"},
            r"config\.json: text_config: hidden_size = '16' should be a whole",
        ),
        "vision": ({"vision_config__num_head": 2}, "vision_config: num_head = 2 is not a key of clip_vision_model"),
        "table": ({"vision_config": [1]}, r"vision_config = \[1\] should be null or a table of keys"),
        "size": ({"projection_dim": 12}, r"text_projection.weight is \[10, 16\] in the file, and the config asks"),
        "layers": (
            {"vision_config__num_hidden_layers": 10**9},
            "num_hidden_layers = 1000000000, and the checkpoint has",
        ),
        "causal": ({"vision_config__is_causal": True}, "vision_config: is_causal = True would change"),
    }.values(),
)
def test_errors_name_the_tower(tmp_path, changes, message):
    with pytest.raises(zoo.CheckpointError, match=message):
        zoo.load(copy_with(tmp_path / "wrong", **changes))


def test_keys_of_both_towers_may_be_ignored(tmp_path):
    changes = {"vision_config__novel": 1, "text_config__novel": 1}
    folder = copy_with(tmp_path / "novel", **changes)
    model = zoo.load(folder, ignore=("novel",))
    for x, y in zip(jax.tree.leaves(model), jax.tree.leaves(zoo.load(FIXTURES / "clip_pairs")), strict=True):
        np.testing.assert_array_equal(x, y)


def test_positions_of_patches_are_a_square(tmp_path):
    folder = copy_with(tmp_path / "wrong", "siglip2_pairs", vision_config__num_patches=15)
    with pytest.raises(zoo.CheckpointError, match="num_patches = 15: positions are learned on a square"):
        zoo.load(folder)


@pytest.mark.parametrize("name, scale, bias", [("clip", 2.6592, None), ("siglip", np.log(10), -10.0)])
def test_similarity_starts_as_published(name, scale, bias):
    towers = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = zoo.models.hf.config.read_config(FAMILIES[name], {"text_config": towers, "vision_config": towers})
    similarity = FAMILIES[name].build(config, key=jax.random.key(0)).similarity
    np.testing.assert_allclose(similarity.log_scale, scale, rtol=1e-6)
    assert similarity.bias == bias
