"""Phi-3.5-MoE (Abdin et al., arXiv:2404.14219; GRIN, arXiv:2409.12136): Mixtral's layer with LayerNorm, and two experts
chosen by SparseMixer, as at inference. Texts longer than the original length are rotated by the long factors, as the
model was trained; transformers 5 takes the short ones for any length."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import LayerNorm
from zoo.models.hf import grammar as hf

from . import llama, mixtral
from .phimoe_layers import SparseMixerRouter


def _build_phimoe(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    if config["lm_head_bias"] and config["tie_word_embeddings"]:
        raise hf.ConfigError(
            "lm_head_bias and tie_word_embeddings: a head that is tied to the embedding has no bias here"
        )
    config = hf.Config(config, rope_parameters=_read_magnitude(config), num_experts_per_tok=2)
    biases = {"bias": config["attention_bias"], "out_bias": config["attention_bias"]}
    mixer = hf.make_attention_factory(config, window=config["sliding_window"], **biases)
    router = partial(SparseMixerRouter, jitter=config["router_jitter_noise"])
    layers = [(mixer, hf.make_mixture_factory(config, router, config["num_experts"]))] * config["num_hidden_layers"]
    norm = partial(LayerNorm, config["hidden_size"], epsilon=config["rms_norm_eps"])
    return hf.build_config_decoder(config, layers, norm, key=key, head_bias=config["lm_head_bias"])


def _read_magnitude(config: hf.Config) -> dict:
    """Return `rope_parameters` with `short_mscale` and `long_mscale`, which scale cos and sin up to the original length
    and beyond, as `attention_factor`.

    **Raises** `ConfigError` if the two differ, and for another `rope_type` with them than "longrope".
    """
    rope = dict(config["rope_parameters"])
    short, long = (rope.pop(key, None) for key in ("short_mscale", "long_mscale"))
    if short is None and long is None:
        return rope
    if short != long or rope["rope_type"] != "longrope":
        raise hf.ConfigError(
            f"short_mscale = {short} and long_mscale = {long} of rope_type {rope['rope_type']!r}: one number for both "
            "is computed here, with 'longrope'"
        )
    return {**rope, "attention_factor": short}


def _map_phimoe_memory_names(config: hf.Config) -> hf.NameMap:
    mixture = {"router": "router.scores", **hf.prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES)}
    return llama.map_llama_layers(hf.prefixed("mlp", "mixture_of_experts", mixture))


PHIMOE = hf.Family(
    name="phimoe",
    architecture="PhimoeForCausalLM",
    build=_build_phimoe,
    names=mixtral.map_mixtral_names,
    defaults={
        **hf.omit(mixtral.MIXTRAL.declared, "num_experts_per_tok"),
        "vocab_size": 32064,
        "intermediate_size": 6400,
        "num_experts": 16,
        "attention_bias": False,
        "lm_head_bias": False,
        "router_jitter_noise": hf.Default(0.01, hf.NON_NEGATIVE_NUMBER),
    },
    aliases=mixtral.MIXTRAL.aliases,
    required_values={**mixtral.MIXTRAL.required_values, "num_experts_per_tok": (2,)},
    rope_keys=("short_mscale", "long_mscale"),
    ignored_keys=frozenset({"input_jitter_noise"}),
    ignored_tensors=mixtral.MIXTRAL.ignored_tensors,
    memory_names=_map_phimoe_memory_names,
)
