"""Mistral 7B (Jiang et al., arXiv:2310.06825): LLaMA's layer, with a sliding window in all layers or none."""

from jaxtyping import Array, Key

from zoo.models.decoder import Decoder
from zoo.models.hf.builders import (
    build_config_decoder,
    make_attention_factory,
    make_gated_mlp_factory,
    make_rms_norm_factory,
)
from zoo.models.hf.kinds import optional_count, optional_non_negative
from zoo.models.hf.spec import Config, Family

from . import llama


def _build_mistral(config: Config, *, key: Key[Array, ""]) -> Decoder:
    norm = make_rms_norm_factory(config)
    mixer = make_attention_factory(config, window=config["sliding_window"])
    layers = [(mixer, make_gated_mlp_factory(config))] * config["num_hidden_layers"]
    return build_config_decoder(config, layers, norm, key=key)


DEFAULTS = {
    **{key: value for key, value in llama.DEFAULTS.items() if key not in ("attention_bias", "mlp_bias")},
    "intermediate_size": 14336,
    "num_key_value_heads": optional_count(8),
    "max_position_embeddings": 131072,
    "sliding_window": optional_non_negative(4096),
}

MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    build=_build_mistral,
    names=llama.map_llama_names,
    defaults=DEFAULTS,
    required_values={"layer_types": (None,)},
    ignored_tensors=llama.LLAMA.ignored_tensors,
    describe=llama.describe_dense,
)
