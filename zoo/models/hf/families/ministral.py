"""Ministral (Mistral AI, "Un Ministral, des Ministraux", 2024): Mistral's layer, with a sliding window where the config
says."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama, mistral


def _build_ministral(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    window = config["sliding_window"]
    ffn = hf.make_gated_mlp_factory(config)
    default = hf.list_layer_types([window is not None] * config["num_hidden_layers"])
    mixers = hf.make_windowed_attention_factories(
        config, hf.list_layer_windows(hf.read_layer_types(config, default), window)
    )
    return hf.build_config_decoder(
        config, [(mixer, ffn) for mixer in mixers], hf.make_rms_norm_factory(config), key=key
    )


MINISTRAL = hf.Family(
    name="ministral",
    architecture="MinistralForCausalLM",
    build=_build_ministral,
    names=llama.map_llama_names,
    defaults={**mistral.DEFAULTS, "layer_types": hf.optional_words()},
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
