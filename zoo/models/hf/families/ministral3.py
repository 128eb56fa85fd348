"""Ministral 3 (Mistral AI, arXiv:2601.08584): Mistral's layer with YaRN, and queries that are scaled by position."""

from jaxtyping import Array, Key

from zoo.layers import PostRotaryAttention
from zoo.layers.query_scale import QueryScale
from zoo.models.hf import grammar as hf

from . import llama, mistral


def _build_ministral3(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    options = {"window": config["sliding_window"], "query_scale": read_query_scale(config)}
    mixer = hf.make_attention_factory(config, attention=PostRotaryAttention, **options)
    layers = [(mixer, hf.make_gated_mlp_factory(config))] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), key=key)


def read_query_scale(config: hf.Config) -> QueryScale | None:
    """Return the scale of queries by position, None if `rope_parameters` has no `llama_4_scaling_beta`. **Raises**
    `ConfigError` if it has one, and no length of a step."""
    strength = config["rope_parameters"].get("llama_4_scaling_beta")
    length = config["rope_parameters"].get("original_max_position_embeddings")
    if strength is not None and length is None:
        raise hf.ConfigError("llama_4_scaling_beta needs original_max_position_embeddings in rope_parameters")
    if strength is None:
        return None
    return QueryScale(strength, length)


def _map_ministral3_names(config: hf.Config) -> hf.NameMap:
    mixer = hf.prefixed("self_attn", "post_rotary_attention", llama.ATTENTION_NAMES)
    return llama.map_llama_layers(hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES), mixer)


ROPE_PARAMETERS = {
    "rope_type": "yarn",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

MINISTRAL3 = hf.Family(
    name="ministral3",
    architecture="Ministral3ForCausalLM",
    build=_build_ministral3,
    names=_map_ministral3_names,
    defaults={
        **mistral.DEFAULTS,
        "vocab_size": 131072,
        "num_hidden_layers": 34,
        "head_dim": hf.optional_count(128),
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "sliding_window": hf.optional_non_negative(),
        "rope_parameters": {
            **ROPE_PARAMETERS,
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
        },
    },
    required_values=mistral.MISTRAL.required_values,
    ignored_tensors=llama.LLAMA.ignored_tensors,
    scaled_rope_theta=10000.0,
    rope_keys=("llama_4_scaling_beta", "max_position_embeddings"),
)
