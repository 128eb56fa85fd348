"""Persimmon (Adept, "Persimmon-8B", 2023): GPT-NeoX's layer with one sublayer after the other, a QK norm with biases,
and MLPs of squared ReLUs."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import LayerNorm
from zoo.models.hf import grammar as hf
from zoo.parallel import Dim

from . import llama


def _build_persimmon(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    qk_norm = None
    if config["qk_layernorm"]:
        size = hf.read_head_sizes(config)[2]
        qk_norm = partial(LayerNorm, size, epsilon=config["layer_norm_eps"], features=Dim("head_dim"))
    mixer = hf.make_attention_factory(config, bias=True, out_bias=True, qk_norm=qk_norm)
    layers = [(mixer, hf.make_mlp_factory(config))] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, hf.make_layer_norm_factory(config), key=key)


def _map_persimmon_names(config: hf.Config) -> hf.NameMap:
    attention = {
        "query_key_value": hf.fused("query", "key", "value", groups=config["num_attention_heads"]),
        "dense": "out",
        "q_layernorm": "query_norm",
        "k_layernorm": "key_norm",
    }
    block = {
        **llama.PRE_NORM_NAMES,
        **hf.prefixed("self_attn", "attention", attention),
        **hf.prefixed("mlp", "mlp", {"dense_h_to_4h": "up", "dense_4h_to_h": "down"}),
    }
    shell = {"model.embed_tokens": "embedding", "model.final_layernorm": "norm", "lm_head": "head"}
    return {**shell, **hf.prefixed("model.layers.*", "layers.*", block)}


PERSIMMON = hf.Family(
    name="persimmon",
    architecture="PersimmonForCausalLM",
    build=_build_persimmon,
    names=_map_persimmon_names,
    defaults={
        "vocab_size": 262144,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "hidden_act": "relu2",
        "max_position_embeddings": 16384,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "qk_layernorm": True,
    },
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
