"""OLMo Hybrid's names of norms, which depend on the kind of layer, and configs without RoPE."""

from pathlib import Path

import pytest

from tests.models.hf.families.respelled import check_respelled_files
from zoo.models.hf.config import read_config
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.families.olmo_hybrid import OLMO_HYBRID
from zoo.models.hf.shapes import build_shapes
from zoo.weights.safetensors import open_tensors, write_safetensors

FIXTURE = Path(__file__).parents[3] / "fixtures" / "models" / "olmo_hybrid"
IN_MEMORY = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}


@pytest.mark.parametrize("renamed", [(0,), (1,), (0, 1)], ids=str)
def test_names_in_memory_are_read_and_written_where_they_stood(tmp_path, renamed):
    """In some layers, in others, and in all."""
    tensors = {}
    for name, tensor in open_tensors(FIXTURE).items():
        if name.startswith(tuple(f"model.layers.{layer}." for layer in renamed)):
            for file, memory in IN_MEMORY.items():
                name = name.replace(f".{file}.", f".{memory}.")
        tensors[name] = tensor.read()
    write_safetensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_bytes((FIXTURE / "config.json").read_bytes())
    check_respelled_files(tmp_path, FIXTURE)


def test_a_null_rope_theta_is_a_model_without_rope():
    def read(given):
        return read_config(OLMO_HYBRID, given)["rope_parameters"]["rope_theta"]

    assert read({"rope_parameters": {"rope_type": "default", "rope_theta": None}}) is None
    assert read({"rope_theta": None}) is None
    assert read({}) == read({"rope_parameters": None}) == 10000.0
    assert read({"rope_theta": 5.0}) == 5.0
    theta = read_config(FAMILIES["llama"], {"rope_theta": None})["rope_parameters"]["rope_theta"]
    assert theta == 10000.0


def test_sizes_that_the_config_omits_follow_from_hidden_size():
    given = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 8}
    model = build_shapes(OLMO_HYBRID, read_config(OLMO_HYBRID, given))
    mixers = [block.mixer for segment in model.stack.segments for block in segment.blocks]
    delta = mixers[0]
    assert (delta.key_dim, delta.value_dim, delta.group, delta.max_beta) == (6, 12, 1, 2.0)
