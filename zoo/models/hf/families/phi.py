"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al., arXiv:2306.11644; Li et al., arXiv:2309.05463): attention and
feed-forward in parallel on one norm, RoPE on part of each head, biases everywhere, in the head too."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import LayerNorm
from zoo.models.hf import grammar as hf
from zoo.parallel import Dim

from . import llama


def _build_phi(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    size = hf.read_head_sizes(config)[2]
    epsilon = config["layer_norm_eps"]
    if config["qk_layernorm"]:
        qk_norm = partial(LayerNorm, size, features=Dim("head_dim"), epsilon=epsilon)
    else:
        qk_norm = None
    mixer = hf.make_attention_factory(config, bias=True, out_bias=True, qk_norm=qk_norm)
    layers = [(mixer, hf.make_mlp_factory(config))] * config["num_hidden_layers"]
    norm = hf.make_layer_norm_factory(config)
    options = {"block": hf.make_one_norm_block, "head_bias": True}
    return hf.build_config_decoder(config, layers, norm, key=key, **options)


def _map_phi_names(config: hf.Config) -> hf.NameMap:
    attention = {
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        "dense": "out",
        "q_layernorm": "query_norm",
        "k_layernorm": "key_norm",
    }
    block = {
        "input_layernorm": "mixer_norm",
        **hf.prefixed("self_attn", "attention", attention),
        **hf.prefixed("mlp", "mlp", {"fc1": "up", "fc2": "down"}),
    }
    shell = {"embed_tokens": "embedding", "final_layernorm": "norm", **hf.prefixed("layers.*", "layers.*", block)}
    return {**hf.prefixed("model", "", shell), "lm_head": "head"}


PHI = hf.Family(
    name="phi",
    architecture="PhiForCausalLM",
    build=_build_phi,
    names=_map_phi_names,
    defaults={
        "vocab_size": 51200,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": hf.optional_count(),
        "head_dim": hf.optional_count(),
        "hidden_act": "gelu_new",
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "qk_layernorm": False,
    },
    # the head has a bias, and a head that is tied to the embedding has none in `zoo.models.Decoder`
    required_values={"tie_word_embeddings": (False,)},
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
