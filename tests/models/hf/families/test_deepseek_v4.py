"""DeepSeek-V4: spellings of configs, the table of experts in its own dtype, names in memory, and refused configs."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import zoo
from zoo.models.hf.config import read_config
from zoo.models.hf.families.deepseek_v4 import DEEPSEEK_V4
from zoo.models.hf.shapes import build_shapes
from zoo.weights.to_torch import list_state

CASE = Path("tests/fixtures/models/deepseek_v4")
TABLE = "model.layers.0.ffn.gate.tid2eid"
ON_THE_HUB = {
    "num_hidden_layers": 4,
    "compress_ratios": [0, 128, 4, 128, 4],
    "num_hash_layers": 2,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "qk_rope_head_dim": 32,
    "topk_method": "noaux_tc",
}


def list_mixers(given):
    return [block.mixer for block in build_shapes(DEEPSEEK_V4, read_config(DEEPSEEK_V4, given)).stack.iter_blocks()]


def test_older_spellings_say_what_layers_are():
    """As transformers reads them: YaRN in layers with blocks only, and without its factor of cos and sin."""
    mixers = list_mixers(ON_THE_HUB)
    assert [x.compressor and x.compressor.block for x in mixers] == [None, 128, 4, 128]
    assert [x.indexer is not None for x in mixers] == [False, False, True, False]
    assert mixers[0].rotary.base == 10000 and mixers[0].rotary.scaling is None
    assert mixers[1].rotary.base == 160000 and mixers[1].rotary.scaling.attention_factor == 1
    assert {x.rotary.dim for x in mixers} == {32}
    blocks = build_shapes(DEEPSEEK_V4, read_config(DEEPSEEK_V4, ON_THE_HUB)).stack.iter_blocks()
    assert [type(block.ffn.router).__name__ for block in blocks] == ["HashRouter"] * 2 + ["BiasedRouter"] * 2
    assert [x.indexer is not None for x in list_mixers({"num_hidden_layers": 6})] == [False] * 3 + [True, False, True]


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_the_table_of_experts_is_written_as_it_was(tmp_path, dtype):
    shutil.copytree(CASE, tmp_path / "case")
    tensors = load_tensors(CASE)
    tensors[TABLE] = tensors[TABLE].astype(dtype)
    save_file(tensors, tmp_path / "case/model.safetensors")
    model = zoo.load(tmp_path / "case")
    table = next(model.stack.iter_blocks()).ffn.router.table
    assert table.dtype == jnp.int32
    np.testing.assert_array_equal(table, tensors[TABLE])
    zoo.save(jax.tree.map(np.asarray, model), tmp_path / "again")
    again = load_tensors(tmp_path / "again")
    assert again[TABLE].dtype == dtype
    np.testing.assert_array_equal(again[TABLE], tensors[TABLE])


def load_tensors(folder):
    return load_file(folder / "model.safetensors")


def test_names_in_memory():
    """All parameters have a name of transformers' class."""
    tensors = list_state(zoo.load(CASE), None, "module").tensors
    index = "model.layers.2.self_attn.compressor.indexer"
    assert {f"{index}.scorer.weights_proj.weight", f"{index}.position_bias", "model.hc_head.hc_fn"} < tensors.keys()
    assert tensors["model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 24, 16)
    assert {name.partition(".")[0] for name in tensors} == {"model", "lm_head"}
    assert len(tensors) == len(load_tensors(CASE)) - 3 * 4 * 3 + 3 * 2


def test_predictors_are_left_aside(tmp_path):
    shutil.copytree(CASE, tmp_path / "case")
    tensors = load_tensors(CASE) | {"mtp.0.norm.weight": np.ones(16, np.float32)}
    save_file(tensors, tmp_path / "case/model.safetensors")
    zoo.save(zoo.load(tmp_path / "case"), tmp_path / "again", source=tmp_path / "case")
    assert load_tensors(tmp_path / "again").keys() == tensors.keys()


@pytest.mark.parametrize(
    "given, message",
    [
        ({"o_groups": 3}, "num_attention_heads = 64 do not divide evenly over o_groups = 3"),
        ({"index_head_dim": 32}, "index_head_dim = 32, and 64 of them are to be turned"),
        ({"compress_ratios": [2]}, "compress_ratios has 2"),
        (
            {"compress_rates": {"sparse": 2}},
            "compress_rates = {'sparse': 2} should be null or a table of whole numbers",
        ),
        (
            {"num_hidden_layers": 1, "compress_ratios": [4], "layer_types": ["sliding_attention"]},
            "say different things",
        ),
        ({"num_hidden_layers": 1, "num_hash_layers": 0, "mlp_layer_types": ["hash_moe"]}, "say different things"),
        ({"num_hidden_layers": 1, "mlp_layer_types": ["dense"]}, "mlp_layer_types should say hash_moe or moe"),
        ({"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "layer_types has 'full_attention'"),
        ({"scoring_func": "tanh"}, "scoring_func = 'tanh' should be one of"),
        ({"norm_topk_prob": False}, "norm_topk_prob = False would change the result"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "keys of blocks are turned once"),
    ],
    ids=str,
)
def test_configs_that_are_refused(given, message):
    with pytest.raises(ValueError) as caught:
        list_mixers(given)
    assert message in str(caught.value)


def test_the_config_of_the_case_has_two_spellings():
    texts = ((CASE / name).read_text() for name in ("config.json", "config_hub.json"))
    written, on_the_hub = (read_config(DEEPSEEK_V4, json.loads(text)) for text in texts)
    assert written == on_the_hub
