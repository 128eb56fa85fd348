"""Ministral (Mistral AI, "Un Ministral, des Ministraux", 2024): Mistral's layer, with a sliding window where the config
says."""

from jaxtyping import Array, Key

from zoo.models.decoder import Decoder
from zoo.models.hf.builders import (
    build_config_decoder,
    list_layer_types,
    list_layer_windows,
    make_gated_mlp_factory,
    make_rms_norm_factory,
    make_windowed_attention_factories,
    read_layer_types,
)
from zoo.models.hf.kinds import optional_words
from zoo.models.hf.spec import Config, Family

from . import llama, mistral


def _build_ministral(config: Config, *, key: Key[Array, ""]) -> Decoder:
    window = config["sliding_window"]
    ffn = make_gated_mlp_factory(config)
    default = list_layer_types([window is not None] * config["num_hidden_layers"])
    mixers = make_windowed_attention_factories(config, list_layer_windows(read_layer_types(config, default), window))
    return build_config_decoder(config, [(mixer, ffn) for mixer in mixers], make_rms_norm_factory(config), key=key)


MINISTRAL = Family(
    name="ministral",
    architecture="MinistralForCausalLM",
    build=_build_ministral,
    names=llama.map_llama_names,
    defaults={**mistral.DEFAULTS, "layer_types": optional_words()},
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
