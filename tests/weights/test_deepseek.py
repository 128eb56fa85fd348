"""DeepSeek checkpoints: multi-token prediction modules, selection biases, unsupported config keys."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.models.hf.config import read_config
from zoo.models.hf.errors import ConfigError
from zoo.models.hf.families import FAMILIES
from zoo.weights.safetensors import open_safetensors, write_safetensors

SIZES = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "kv_lora_rank": 4, "q_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2}
SIZES |= {"v_head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
SIZES |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}


@pytest.fixture
def directory(make, tmp_path):
    zoo.save(make("deepseek_v3", SIZES), tmp_path)
    return tmp_path


def bits(model):
    return [(x.dtype, np.asarray(x).tobytes()) for x in jax.tree.leaves(model)]


def stored(directory):
    return {name: np.array(tensor.read()) for name, tensor in open_safetensors(directory / "model.safetensors").items()}


def store(directory, tensors, **keys):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | keys))
    write_safetensors(directory / "model.safetensors", tensors)


def with_predictor(tensors):
    """Add a multi-token prediction module as on the hub: one more layer, projections, embedding and head again."""
    last = {name: x for name, x in tensors.items() if name.startswith("model.layers.1.")}
    module = {name.replace(".layers.1.", ".layers.2."): x for name, x in last.items()}
    more = {"eh_proj.weight": np.ones((8, 16)), "enorm.weight": np.ones(8), "hnorm.weight": np.ones(8)}
    more |= {"embed_tokens.weight": tensors["model.embed_tokens.weight"], "shared_head.norm.weight": np.ones(8)}
    more |= {"shared_head.head.weight": tensors["lm_head.weight"]}
    return tensors | module | {f"model.layers.2.{name}": x.astype(np.float32) for name, x in more.items()}


def test_deepseek_predictor_of_a_base_model_is_ignored(directory):
    expected, tensors = bits(zoo.load(directory)), stored(directory)
    both = {name.removeprefix("model."): x for name, x in with_predictor(tensors).items()}
    store(directory, both, num_nextn_predict_layers=1)
    model = zoo.load(directory)
    assert bits(model) == expected
    zoo.save(model, directory / "again")
    assert stored(directory / "again").keys() == {name.removeprefix("model.") for name in tensors}


def test_deepseek_predictor_is_read_and_written_with_its_copies(directory):
    """The copies of embedding and head follow the model's; a file whose copies differ is refused."""
    expected, tensors = zoo.load(directory), stored(directory)
    both = with_predictor(tensors)
    store(directory, both, num_nextn_predict_layers=1)
    model = zoo.load(directory)
    assert bits(dataclasses.replace(model, predictors=())) == bits(expected)
    np.testing.assert_array_equal(model.predictors[0].projection.weight, np.ones((8, 16)))
    zoo.save(model, directory / "again")
    for name, x in stored(directory / "again").items():
        assert x.tobytes() == both[name].tobytes(), name
    trained = eqx.tree_at(lambda model: model.embedding.weight, model, replace_fn=lambda x: x + 1)
    zoo.save(trained, directory / "trained")
    after = stored(directory / "trained")
    assert after.keys() == both.keys()
    np.testing.assert_array_equal(after["model.layers.2.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert json.loads((directory / "trained/config.json").read_text())["num_nextn_predict_layers"] == 1
    zoo.save(dataclasses.replace(model, predictors=()), directory / "bare")
    assert stored(directory / "bare").keys() == tensors.keys()
    assert json.loads((directory / "bare/config.json").read_text())["num_nextn_predict_layers"] == 0
    store(directory, both | {"model.layers.2.shared_head.head.weight": both["lm_head.weight"] + 1})
    with pytest.raises(zoo.CheckpointError, match=r"shared_head.head.weight is not lm_head.weight, and a predictor"):
        zoo.load(directory)


def test_deepseek_extra_layer_is_refused(directory):
    tensors = stored(directory)
    store(directory, tensors, num_hidden_layers=1)
    with pytest.raises(zoo.CheckpointError, match=r"model.layers.1.input_layernorm.weight \[8\] has no place"):
        zoo.load(directory)
    store(directory, with_predictor(tensors), num_hidden_layers=3)
    with pytest.raises(zoo.CheckpointError, match=r"model.layers.2.eh_proj.weight \[8, 16\] has no place"):
        zoo.load(directory)


def test_deepseek_selection_bias_is_not_rounded(directory):
    bias = lambda model: [*model.stack.iter_blocks()][1].ffn.router.selection_bias
    whole, half = zoo.load(directory), zoo.load(directory, dtype=jnp.bfloat16)
    assert bias(half).dtype == jnp.float32 and jnp.array_equal(bias(half), bias(whole))
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(zoo.trainable(half)))
    zoo.save(half, directory / "half")
    again = zoo.load(directory / "half")
    assert bits(again) == bits(half)
    assert bias(zoo.load(directory / "half", dtype=jnp.float32)).dtype == jnp.float32


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
V2 = {key: value for key, value in SIZES.items() if key not in ("n_group", "topk_group")}


@pytest.mark.parametrize(
    ("family", "keys", "told"),
    [
        ("deepseek_v3", {"quantization_config": FP8}, "quantization_config = "),
        ("deepseek_v3", {"num_key_value_heads": 1}, "num_key_value_heads = 1, and latent attention has a key for each"),
        ("deepseek_v3", {"head_dim": 6}, "head_dim = 6, and it is qk_rope_head_dim = 2 that is meant"),
        ("deepseek_v3", {"qk_rope_head_dim": 3}, "qk_rope_head_dim = 3: rotary embeddings turn pairs"),
        ("deepseek_v3", {"n_group": 3}, "n_group = 3.*4 experts do not divide evenly over 3 groups"),
        ("deepseek_v3", {"num_experts_per_tok": 3}, "num_experts_per_tok = 3.*hold 2 experts, and a token goes to 3"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax' would change the result"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2 would change the result"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok has to be given"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc', and 'greedy' and"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "needs n_group and topk_group"),
    ],
)
def test_deepseek_unsupported_config_keys_are_named(make, family, keys, told):
    with pytest.raises(ConfigError, match=told):
        make(family, (SIZES if family == "deepseek_v3" else V2) | keys)


def test_deepseek_biases_are_where_transformers_has_them(make):
    """`mlp_bias` is for dense layers and shared experts only; `attention_bias` for projections from and to the residual
    stream."""
    model = make("deepseek_v2", V2 | {"mlp_bias": True, "attention_bias": True})
    names = {place.name for place in zoo.models.list_parameter_paths(model) if place.name.endswith(".bias")}
    attention = {f"latent_attention.{part}" for part in ("query_down", "latent", "rotary_key", "out")}
    gated = {
        f"{place}.{part}" for place in ("gated_mlp", "mixture_of_experts.shared") for part in ("gate", "up", "down")
    }
    assert names == {f"layers.*.{part}.bias" for part in attention | gated}


def test_deepseek_hub_config_is_read():
    """Keys of deepseek-ai/DeepSeek-V2-Lite that are redundant or do not affect the result."""
    hub = {"aux_loss_alpha": 0.001, "moe_layer_freq": 1, "scoring_func": "softmax", "seq_aux": True, "ep_size": 1}
    hub |= {"norm_topk_prob": False, "pretraining_tp": 1, "attention_dropout": 0.0, "auto_map": {"AutoModel": "a.B"}}
    assert read_config(FAMILIES["deepseek_v2"], hub) == read_config(FAMILIES["deepseek_v2"], {})


def test_kimi_k2_reads_as_deepseek_v3_and_keeps_its_name(directory):
    expected, before = bits(zoo.load(directory)), (directory / "model.safetensors").read_bytes()
    store(directory, stored(directory), model_type="kimi_k2")
    model = zoo.load(directory)
    assert model.origin.family is FAMILIES["deepseek_v3"] and bits(model) == expected
    zoo.save(model, directory / "again")
    assert json.loads((directory / "again" / "config.json").read_text())["model_type"] == "kimi_k2"
    assert (directory / "again" / "model.safetensors").read_bytes() == before
