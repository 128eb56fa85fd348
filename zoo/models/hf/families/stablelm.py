"""StableLM (Bellagente et al., arXiv:2402.17834): LLaMA's layer with LayerNorms and RoPE on part of each head. With
StableLM 2 12B's options, attention and feed-forward are in parallel on one norm, and each head has a QK norm."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers.norm import PerHeadLayerNorm
from zoo.models.hf import grammar as hf

from . import llama


def _build_stablelm(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    if config["qk_layernorm"]:
        qk_norm = partial(PerHeadLayerNorm, epsilon=config["layer_norm_eps"])
    else:
        qk_norm = None
    mixer = hf.make_attention_factory(config, bias=config["use_qkv_bias"], norm_over_heads=qk_norm)
    layers = [(mixer, hf.make_gated_mlp_factory(config))] * config["num_hidden_layers"]
    block = hf.make_one_norm_block if config["use_parallel_residual"] else hf.Block
    return hf.build_config_decoder(config, layers, hf.make_layer_norm_factory(config), block=block, key=key)


def _map_stablelm_names(config: hf.Config) -> hf.NameMap:
    attention = {
        **hf.omit(llama.ATTENTION_NAMES, "q_norm", "k_norm"),
        "q_layernorm.norms.*": "query_norm.norms.*",
        "k_layernorm.norms.*": "key_norm.norms.*",
    }
    mixer = hf.prefixed("self_attn", "attention", attention)
    return llama.map_llama_layers(hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES), mixer)


STABLELM = hf.Family(
    name="stablelm",
    architecture="StableLmForCausalLM",
    build=_build_stablelm,
    names=_map_stablelm_names,
    defaults={
        "vocab_size": 50304,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": hf.optional_count(32),
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
    },
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
