"""Configs of multimodal checkpoints, read as their language model's and written back."""

import json

import pytest

from zoo.models.hf.config import read_config
from zoo.models.hf.errors import ConfigError
from zoo.models.hf.families import FAMILIES, get_family
from zoo.models.hf.wrappers import WRAPPERS, read_text_config, rename, unwrap_config, wrap_config

NAMES = ["language_model.model.norm.weight", "vision_tower.x"]


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapper_names_a_family_and_its_tie(name):
    text = read_text_config({"model_type": name, "text_config": {"hidden_size": 3}})
    assert get_family(text["model_type"]) is not None
    assert text["tie_word_embeddings"] is WRAPPERS[name].tied and text["hidden_size"] == 3
    assert FAMILIES[text["model_type"]].head == "lm_head"  # by this, a stored head is found
    assert FAMILIES[text["model_type"]].embedding.startswith("model.")


def test_config_of_a_language_model_is_left_as_it_is():
    config = {"model_type": "llama", "text_config": 5}
    assert read_text_config(config) == config
    assert unwrap_config(config, FAMILIES["llama"], NAMES) == (config, None)
    with pytest.raises(ConfigError, match="text_config = None should be a table"):
        read_text_config({"model_type": "llava"})


def test_quantization_and_dtype_are_read_at_the_top():
    top = {"model_type": "mistral3", "quantization_config": {"quant_method": "fp8"}, "torch_dtype": "bfloat16"}
    text = read_text_config({**top, "text_config": {"hidden_size": 3}})
    assert text["quantization_config"] == top["quantization_config"] and text["torch_dtype"] == "bfloat16"
    assert "torch_dtype" not in read_text_config({**top, "text_config": {"dtype": "float32"}})


def test_changed_keys_are_written_where_they_stood():
    config = {"model_type": "mistral3", "dtype": "float32", "quantization_config": {}, "eos": 1, "vision_config": {}}
    config |= {"text_config": {"model_type": "mistral", "dtype": "float32", "eos": 1, "rms_norm_eps": 1e-5}}
    text, wrapping = unwrap_config(config, FAMILIES["mistral"], NAMES)
    assert wrap_config(text, wrapping) == config
    del text["quantization_config"]
    text |= {"dtype": "bfloat16", "eos": 2, "rms_norm_eps": 1e-6, "vocab_size": 8, "tie_word_embeddings": False}
    inner = {"model_type": "mistral", "dtype": "bfloat16", "eos": 2, "rms_norm_eps": 1e-6, "vocab_size": 8}
    expected = {"model_type": "mistral3", "dtype": "bfloat16", "eos": 2, "vision_config": {}, "text_config": inner}
    assert wrap_config(text, wrapping) == expected | {"tie_word_embeddings": False}
    assert json.loads(wrapping.config) == config


@pytest.mark.parametrize(
    "names, norm, head",
    [
        (["language_model.model.norm.weight"], "language_model.model.norm", "language_model.lm_head"),
        (["language_model.model.norm.weight", "lm_head.weight"], "language_model.model.norm", "lm_head"),
        (["model.language_model.norm.weight"], "model.language_model.norm", "lm_head"),
        (
            ["model.language_model.norm.weight", "language_model.lm_head.weight"],
            "model.language_model.norm",
            "language_model.lm_head",
        ),
    ],
)
def test_names_follow_the_layout_of_the_file(names, norm, head):
    _, wrapping = unwrap_config({"model_type": "llama4", "text_config": {}}, FAMILIES["llama4_text"], names)
    assert rename("model.norm", wrapping) == norm and rename("lm_head", wrapping) == head
    assert rename("model.norm", None) == "model.norm"


@pytest.mark.parametrize(
    "name, family, key",
    [
        ("gemma3", "gemma3_text", "final_logit_softcapping"),
        ("gemma3n", "gemma3n_text", "final_logit_softcapping"),
        ("gemma4", "gemma4_text", "final_logit_softcapping"),
        ("aya_vision", "cohere2", "logit_scale"),
        ("llava_next", "granite", "logits_scaling"),
    ],
)
def test_logits_are_capped_and_scaled_as_the_wrapper_does(name, family, key):
    config = {"model_type": name, "text_config": {"model_type": family, key: 3.0}}
    text, wrapping = unwrap_config(config, FAMILIES[family], NAMES)
    scales = WRAPPERS[name].scales_logits
    assert scales == (name in ("gemma3n", "gemma4")) and (read_config(FAMILIES[family], text)[key] == 3.0) == scales
    assert wrap_config(text, wrapping) == config
    if not scales:  # nor by the default of the language model's class
        text, _ = unwrap_config({"model_type": name, "text_config": {}}, FAMILIES[family], NAMES)
        assert text[key] in (None, 1.0)


def test_rope_of_three_dims_is_plain_rope_without_images():
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    sections = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    read = lambda name, rope: read_config(FAMILIES[name], {"rope_parameters": rope})
    assert read("qwen3_5_text", rope | sections) == read("qwen3_5_text", rope)
    with pytest.raises(ConfigError, match="'default' has no key 'mrope_section'"):
        read("glm4_moe", rope | sections)
