"""Reasons for the checkpoints that are not read: in the error of `zoo.load`, and never for those that are."""

import json

import pytest

import zoo
from zoo.models.hf.families import get_family
from zoo.models.hf.not_read import find_nearest, find_reason, list_reasons
from zoo.models.hf.wrappers import WRAPPERS


def test_reasons_are_given_for_families_that_are_not_read():
    listed = [model_type for model_types, _ in list_reasons() for model_type in model_types]
    assert len(listed) == len(set(listed)) >= 10
    for model_type in listed:
        assert get_family(model_type) is None and model_type not in WRAPPERS, f"{model_type} is read now"
    assert {"led", "deberta", "rwkv5"} <= {*listed}
    assert find_reason("llama") is None and find_reason(None) is None and find_reason([]) is None


def test_nearest_families_are_read():
    listed = [model_type for model_types, _ in list_reasons() for model_type in model_types]
    nearest = {model_type: find_nearest(model_type) for model_type in listed}
    assert all(name is None or get_family(name) is not None for name in nearest.values())
    assert nearest["deberta"] == "deberta-v2" and nearest["qwen3_vl_moe"] == "qwen3_vl"
    assert (
        nearest["rwkv5"] == "rwkv6"
        and nearest["led"] == "bart"
        and find_nearest("llama") is None
        and find_nearest([]) is None
    )


@pytest.mark.parametrize("config", [{"model_type": "rwkv5"}, {"model_type": "llava", "text_config": {}}])
def test_load_gives_the_reason(tmp_path, config):
    if "text_config" in config:
        config["text_config"]["model_type"] = "rwkv5"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(zoo.CheckpointError, match="model_type 'rwkv5', which is not read: RWKV-5 has no"):
        zoo.load(tmp_path)


@pytest.mark.parametrize(
    "model_type, words",
    [
        ("deberta", r"The nearest family that is read is 'deberta-v2'\."),
        ("qwen3_vl_moe", r"The nearest family that is read is 'qwen3_vl'\."),
        ("led", "tokens of its source that attend to all others"),
        ("llamma", "did you mean 'llama'"),
    ],
)
def test_load_names_the_nearest_family(tmp_path, model_type, words):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(zoo.CheckpointError, match=words) as raised:
        zoo.load(tmp_path)
    assert str(raised.value).endswith("`zoo families` lists what is read") and ".." not in str(raised.value)
