"""RecurrentGemma (Botev et al., arXiv:2404.07839), a Griffin (arXiv:2402.19427): of three layers, two have an RG-LRU
and the third attention with a sliding window and RoPE on half of each head; Gemma's norms and MLP, capped logits."""

from functools import partial

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from zoo.layers import RGLRU
from zoo.models.hf import grammar as hf

from . import llama


def _build_recurrent_gemma(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    recurrent = partial(
        RGLRU,
        config["hidden_size"],
        config["num_attention_heads"],
        inner=config["lru_width"],
        conv_width=config["conv1d_width"],
        bias=True,
        activation=hf.find_activation(config),
        out_scale=hf.compute_out_scale(config),
    )
    window = config["attention_window_size"]
    attention = hf.make_attention_factory(config, bias=config["attention_bias"], out_bias=True, window=window)
    mixers = {"recurrent": recurrent, "attention": attention}
    types = config["block_types"]
    if not types or not {*types} <= mixers.keys():
        raise hf.ConfigError(f"block_types = {types!r} should be a list of the words {' and '.join(mixers)}")
    ffn = hf.make_gated_mlp_factory(config, width=config["intermediate_size"] // 2, bias=True)
    layers = [(mixers[types[number % len(types)]], ffn) for number in range(config["num_hidden_layers"])]
    multiplier = float(np.array(config["hidden_size"] ** 0.5, jnp.bfloat16))  # the class holds it in bfloat16
    norm = hf.make_rms_norm_factory(config, offset=1.0)
    cap = config["logits_soft_cap"]
    return hf.build_config_decoder(config, layers, norm, multiplier=multiplier, soft_cap=cap, key=key)


def _map_recurrent_gemma_names(config: hf.Config) -> hf.NameMap:
    per_head = {"groups": config["num_attention_heads"], "per_head": True}
    gates: dict[str, hf.TensorMapping] = {}
    for theirs, ours in (("recurrent_gate", "recurrence_gate"), ("input_gate", "input_gate")):
        gates[f"{theirs}_weight"] = hf.TensorMapping((f"{ours}.weight",), transposed=True, **per_head)
        gates[f"{theirs}_bias"] = hf.TensorMapping((f"{ours}.bias",), **per_head)
    recurrent: hf.NameMap = {
        "linear_x": "input",
        "linear_y": "gate",
        "linear_out": "out",
        "conv_1d": hf.fused("convolution", conv1d_filters=True),
        **hf.prefixed("rg_lru", "", {**gates, "recurrent_param": "decay"}),
    }
    mixers = {**hf.prefixed("", "rglru", recurrent), **hf.prefixed("", "attention", llama.ATTENTION_NAMES)}
    block = {
        "temporal_pre_norm": "mixer_norm",
        "channel_pre_norm": "ffn_norm",
        **hf.prefixed("temporal_block", "", mixers),
        **hf.prefixed("mlp_block", "gated_mlp", llama.GATED_MLP_NAMES),
    }
    shell = {"model.embed_tokens": "embedding", "model.final_norm": "norm", "lm_head": "head"}
    return {**shell, **hf.prefixed("model.layers.*", "layers.*", block)}


RECURRENT_GEMMA = hf.Family(
    name="recurrent_gemma",
    architecture="RecurrentGemmaForCausalLM",
    build=_build_recurrent_gemma,
    names=_map_recurrent_gemma_names,
    defaults={
        "vocab_size": 256000,
        "hidden_size": 2560,
        "intermediate_size": 3 * 2560,
        "num_hidden_layers": 26,
        "num_attention_heads": 10,
        "num_key_value_heads": hf.optional_count(),
        "head_dim": hf.optional_count(),
        "lru_width": hf.optional_count(),
        "conv1d_width": 4,
        "block_types": hf.Default(["recurrent", "recurrent", "attention"], hf.list_of(hf.WORD)),
        "attention_window_size": 2048,
        "max_position_embeddings": 8192,
        "attention_bias": False,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "logits_soft_cap": hf.Default(30.0, hf.POSITIVE_NUMBER),
        "tie_word_embeddings": True,
    },
    aliases={
        "hidden_activation": "hidden_act",
        "sliding_window": "attention_window_size",
        "_block_types": "block_types",
    },
    required_values={"embeddings_scale_by_sqrt_dim": (True,)},
    ignored_keys=frozenset({"w_init_variance_scale", "final_w_init_variance_scale"}),  # initialization
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
