"""Mistral 7B (Jiang et al., arXiv:2310.06825): LLaMA's layer, with a sliding window in all layers or none."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama


def _build_mistral(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    norm = hf.make_rms_norm_factory(config)
    mixer = hf.make_attention_factory(config, window=config["sliding_window"])
    layers = [(mixer, hf.make_gated_mlp_factory(config))] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, norm, key=key)


DEFAULTS = {
    **hf.omit(llama.DEFAULTS, "attention_bias", "mlp_bias"),
    "intermediate_size": 14336,
    "num_key_value_heads": hf.optional_count(8),
    "max_position_embeddings": 131072,
    "sliding_window": hf.optional_non_negative(4096),
}

MISTRAL = hf.Family(
    name="mistral",
    architecture="MistralForCausalLM",
    build=_build_mistral,
    names=llama.map_llama_names,
    defaults=DEFAULTS,
    required_values={"layer_types": (None,)},
    ignored_tensors=llama.LLAMA.ignored_tensors,
    describe=hf.describe_dense,
)
