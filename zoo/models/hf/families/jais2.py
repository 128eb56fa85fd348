"""Jais 2 (Inception, MBZUAI and Cerebras, "Jais 2", 2025): LLaMA's layer with LayerNorms, biases everywhere but in the
head, and an MLP of squared ReLUs without a gate."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import arcee, llama


def _build_jais2(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    bias = config["attention_bias"]
    mixer = hf.make_attention_factory(config, bias=bias, out_bias=bias)
    layers = [(mixer, hf.make_mlp_factory(config, bias=config["mlp_bias"]))] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, hf.make_layer_norm_factory(config), key=key)


JAIS2 = hf.Family(
    name="jais2",
    architecture="Jais2ForCausalLM",
    build=_build_jais2,
    names=arcee.map_arcee_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "rms_norm_eps"),
        "vocab_size": 150272,
        "hidden_size": 3328,
        "intermediate_size": 26624,
        "num_attention_heads": 26,
        "hidden_act": "relu2",
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "attention_bias": True,
        "mlp_bias": True,
    },
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
