"""Nemotron-4 and Minitron (Parmar et al., arXiv:2402.16819; Muralidharan et al., arXiv:2407.14679): LayerNorm scales
1 + w, RoPE on part of each head, and an MLP of squared ReLUs without a gate."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import arcee, llama


def _build_nemotron(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    norm = hf.make_layer_norm_factory(config, offset=1.0)
    bias = config["attention_bias"]
    mixer = hf.make_attention_factory(config, bias=bias, out_bias=bias)
    layers = [(mixer, hf.make_mlp_factory(config, bias=config["mlp_bias"]))] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, norm, key=key)


NEMOTRON = hf.Family(
    name="nemotron",
    architecture="NemotronForCausalLM",
    build=_build_nemotron,
    names=arcee.map_arcee_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "rms_norm_eps"),
        "vocab_size": 256000,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_attention_heads": 48,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    aliases={"norm_eps": "layer_norm_eps"},
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
