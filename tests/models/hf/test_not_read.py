"""Reasons for the checkpoints that are not read: in the error of `zoo.load`, and never for those that are."""

import json

import pytest

import zoo
from zoo.models.hf.families import get_family
from zoo.models.hf.not_read import find_reason, list_reasons
from zoo.models.hf.wrappers import WRAPPERS


def test_reasons_are_given_for_families_that_are_not_read():
    listed = [model_type for model_types, _ in list_reasons() for model_type in model_types]
    assert len(listed) == len(set(listed)) > 40
    for model_type in listed:
        assert get_family(model_type) is None and model_type not in WRAPPERS, f"{model_type} is read now"
    assert {"t5", "lfm2_moe", "qwen3_5_moe", "lfm2", "minimax", "zamba2"} <= {*listed}
    assert find_reason("llama") is None and find_reason(None) is None and find_reason([]) is None


@pytest.mark.parametrize("config", [{"model_type": "rwkv7"}, {"model_type": "llava", "text_config": {}}])
def test_load_gives_the_reason(tmp_path, config):
    if "text_config" in config:
        config["text_config"]["model_type"] = "rwkv7"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(zoo.CheckpointError, match="model_type 'rwkv7', which is not read: RWKV after its"):
        zoo.load(tmp_path)
