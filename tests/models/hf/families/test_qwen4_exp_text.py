"""Qwen4-Exp: the types of layers, the memories of n-grams, tensors that follow from the config, and refused configs."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import zoo
from zoo.layers import GroupedGatedDeltaNet, IndexedAttention
from zoo.models.gated_connections import NGramBlock
from zoo.models.hf.config import read_config
from zoo.models.hf.families.qwen4_exp_text import QWEN4_EXP_TEXT
from zoo.models.hf.shapes import build_shapes
from zoo.weights.to_torch import list_state

CASE = Path("tests/fixtures/models/qwen4_exp_text")
SIZES = {"indexer_n_heads": 4, "indexer_head_dim": 64, "indexer_budget": 64, "indexer_compress_ratio": 16}
SMALL = SIZES | {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 64,
    "num_experts": 2,
    "num_experts_per_tok": 1,
}
MEMORY = {"ple_layer_ids": [2, 1], "ngram_vocab_size_base": 31, "split_ngram_parts": 2, "eos_token_id": [7, 8]}


def list_blocks(given):
    return list(build_shapes(QWEN4_EXP_TEXT, read_config(QWEN4_EXP_TEXT, given)).stack.iter_blocks())


@pytest.mark.parametrize(
    "name", ["indexed_attention", "full_attention", "qwen_sparse_attention", "deepseek_sparse_attention"]
)
def test_types_of_layers(name):
    """Every fourth layer has attention by default; files call it by four names."""
    mixers = [type(block.mixer) for block in list_blocks(SMALL)]
    assert mixers == [GroupedGatedDeltaNet] * 3 + [IndexedAttention]
    given = SMALL | {"layer_types": [name, *["linear_attention"] * 3]}
    assert [type(block.mixer) for block in list_blocks(given)] == mixers[::-1]


def test_memories_are_counted_from_one():
    blocks = list_blocks(SMALL | MEMORY)
    assert [isinstance(block, NGramBlock) for block in blocks] == [True, True, False, False]
    first, second = (block.memory.embedding for block in blocks[:2])
    assert first.boundary == 7 and first.sizes[0][0] == 31
    assert len({*first.sizes[0], *first.sizes[1], *second.sizes[0], *second.sizes[1]}) == 32
    assert not set(first.multipliers) & set(second.multipliers)
    parts, rows, _ = first.tables.weight.shape[-3:]
    assert parts == 2 and 2 * rows % 128 == 0


def test_the_end_of_a_text_may_be_the_first_id():
    block, *_ = list_blocks(SMALL | MEMORY | {"eos_token_id": 0})
    assert block.memory.embedding.boundary == 0


def test_hashes_are_those_of_the_file():
    """Multipliers, sizes and offsets follow from the config, and transformers writes them into its files, too."""
    tensors = load_file(CASE / "model.safetensors")
    model = zoo.load(CASE)
    for number, block in enumerate(model.stack.iter_blocks()):
        if not isinstance(block, NGramBlock):
            continue
        prefix = f"model.layers.{number}.ple.ple_embedding"
        sizes = [size for sizes in block.memory.embedding.sizes for size in sizes]
        assert block.memory.embedding.multipliers == tuple(tensors[f"{prefix}.layer_multipliers"].tolist())
        assert sizes == tensors[f"{prefix}.ngram_heads_vocab_sizes"].tolist()
        assert np.cumsum([0, *sizes[:-1]]).tolist() == tensors[f"{prefix}.ngram_heads_offsets"].tolist()


def test_a_module_has_one_table():
    """Files cut the table of a layer into parts, and transformers' module has it whole."""
    tensors = load_file(CASE / "model.safetensors")
    state = list_state(zoo.load(CASE), None, "module").tensors
    prefix = "model.layers.0.ple.ple_embedding.ngram_embedding"
    parts = [tensors[f"{prefix}.shard_{number}.weight"] for number in range(2)]
    assert not any("shard" in name for name in state)
    np.testing.assert_array_equal(state[f"{prefix}.weight"].read(), np.concatenate(parts))
    assert state["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 24, 16)


def test_the_gate_of_the_delta_rule(tmp_path):
    """It is a sigmoid in this file, and silu where the config does not say."""
    tokens = jnp.arange(10)[None]
    shutil.copytree(CASE, tmp_path / "case")
    config = json.loads((CASE / "config.json").read_text())
    (tmp_path / "case/config.json").write_text(json.dumps(config | {"output_gate_type": None}))
    found = [np.asarray(zoo.load(folder, dtype=jnp.float32)(tokens)) for folder in (CASE, tmp_path / "case")]
    assert np.abs(found[0] - found[1]).max() > 1e-2


def test_a_wrapper_is_read_without_its_images(tmp_path):
    shutil.copytree(CASE, tmp_path / "case")
    config = json.loads((CASE / "config.json").read_text())
    wrapped = {"model_type": "qwen4_exp", "architectures": ["Qwen4ExpForConditionalGeneration"], "text_config": config}
    (tmp_path / "case/config.json").write_text(json.dumps(wrapped))
    tensors = load_file(CASE / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    save_file(renamed, tmp_path / "case/model.safetensors")
    tokens = jnp.arange(10)[None]
    np.testing.assert_array_equal(zoo.load(tmp_path / "case")(tokens), zoo.load(CASE)(tokens))


@pytest.mark.parametrize(
    "given, message",
    [
        ({"indexer_budget": 63}, "indexer_budget = 63 is not a multiple of indexer_compress_ratio = 16"),
        ({"indexer_head_dim": 8}, "indexer_head_dim = 8, and 64 of them are to be turned"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads = 2 would change the result"),
        ({"indexer_budget": None}, "indexer_budget has to be given"),
        ({"output_gate_type": "tanh"}, "output_gate_type = 'tanh' should be null, silu or sigmoid"),
        ({"ple_layer_ids": [0]}, "ple_layer_ids = [0]: layers are counted from 1 to 4"),
        ({"ple_layer_ids": [5]}, "ple_layer_ids = [5]: layers are counted from 1 to 4"),
        (MEMORY | {"eos_token_id": None}, "eos_token_id has to be given"),
        (MEMORY | {"ple_embed_dim": 24}, "24 features do not divide evenly over 8 hashes"),
        (MEMORY | {"split_ngram_parts": 7}, "split_ngram_parts = 7"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types has 'sliding_attention'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic': keys of blocks are turned once"),
        (MEMORY | {"eos_token_id": []}, "eos_token_id = [] should be null or an id, or ids"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' would change the result"),
    ],
    ids=str,
)
def test_configs_that_are_refused(given, message):
    with pytest.raises(ValueError) as caught:
        list_blocks(SMALL | given)
    assert message in str(caught.value)
