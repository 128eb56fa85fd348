"""Apertus (Swiss AI, arXiv:2509.14233): LLaMA's layer with QK norm, and an MLP with xIELU that has no gate."""

from functools import partial

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama
from .apertus_layers import XieluMLP


def _build_apertus(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    bias = config["attention_bias"]
    mixer = hf.make_attention_factory(config, qk_norm=hf.make_head_norm_factory(config), bias=bias, out_bias=bias)
    ffn = partial(XieluMLP, config["hidden_size"], config["intermediate_size"], out_scale=hf.compute_out_scale(config))
    layers = [(mixer, ffn)] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), key=key)


def _map_apertus_names(config: hf.Config) -> hf.NameMap:
    norms = {"attention_layernorm": "mixer_norm", "feedforward_layernorm": "ffn_norm"}
    mlp = hf.prefixed("mlp", "xielu_mlp", {"up_proj": "up", "act_fn": "xielu", "down_proj": "down"})
    return llama.map_llama_layers(mlp, norms=norms)


APERTUS = hf.Family(
    name="apertus",
    architecture="ApertusForCausalLM",
    build=_build_apertus,
    names=_map_apertus_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "mlp_bias", "hidden_act", "head_dim"),
        "vocab_size": 131072,
        "intermediate_size": 14336,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_theta": 12000000.0,
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    required_values={"hidden_act": ("xielu",), "mlp_bias": (False,)},
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
