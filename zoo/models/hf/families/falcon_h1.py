"""Falcon-H1 (Zuo et al., arXiv:2507.22448): attention and Mamba-2 side by side in every layer, a gated MLP after them,
and multipliers of embeddings, logits, keys, inputs, outputs and projections."""

from functools import partial

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import bamba, llama
from .falcon_h1_layers import MultipliedMLP, SideBySide
from .mamba2 import MIXER_NAMES


def _build_falcon_h1(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    bias = config["attention_bias"]
    scale = None
    if config["key_multiplier"] != 1:  # keys are multiplied, and with them the scores
        scale = config["key_multiplier"] * hf.read_head_sizes(config)[2] ** -0.5
    projections = config["ssm_multipliers"]
    if projections is not None and all(multiplier == 1 for multiplier in projections):
        projections = None
    recurrent = bamba.make_mamba2_factory(
        config,
        inner=config["mamba_d_ssm"],
        out_bias=config["projectors_bias"],
        norm=config["mamba_rms_norm"],
        norm_before_gate=config["mamba_norm_before_gate"],
        multipliers=None if projections is None else tuple(map(float, projections)),
    )
    mixer = partial(
        SideBySide,
        hf.make_attention_factory(config, bias=bias, out_bias=bias, scale=scale),
        recurrent,
        attention_multipliers=(config["attention_in_multiplier"], config["attention_out_multiplier"]),
        recurrent_multipliers=(config["ssm_in_multiplier"], config["ssm_out_multiplier"]),
    )
    gate, down = map(float, config["mlp_multipliers"] or (1, 1))
    ffn = partial(
        MultipliedMLP,
        config["hidden_size"],
        config["intermediate_size"],
        multipliers=(gate, down),
        activation=hf.find_activation(config),
        bias=config["mlp_bias"],
        out_scale=hf.compute_out_scale(config),
    )
    multipliers = {"multiplier": config["embedding_multiplier"], "logits_multiplier": config["lm_head_multiplier"]}
    layers = [(mixer, ffn)] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), key=key, **multipliers)


def _map_falcon_h1_names(config: hf.Config) -> hf.NameMap:
    mixers = {
        **hf.prefixed("self_attn", "side_by_side.attention", llama.ATTENTION_NAMES),
        **hf.prefixed("mamba", "side_by_side.recurrent", MIXER_NAMES),
    }
    return bamba.map_bamba_layers(mixers, hf.prefixed("feed_forward", "multiplied_mlp", llama.GATED_MLP_NAMES))


def _make_numbers_kind(words: str, count: int) -> hf.ValueKind:
    """Return the kind of lists of this many numbers, and null."""
    kind = hf.ValueKind(
        f"a list of {words} numbers", lambda value: hf.list_of(hf.NUMBER).fits(value) and len(value) == count
    )
    return hf.optional(kind)


FALCON_H1 = hf.Family(
    name="falcon_h1",
    architecture="FalconH1ForCausalLM",
    build=_build_falcon_h1,
    names=_map_falcon_h1_names,
    defaults={
        **llama.DEFAULTS,
        "vocab_size": 128000,
        "intermediate_size": 14336,
        "num_key_value_heads": hf.optional_count(8),
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        **bamba.MAMBA2_DEFAULTS,
        "mamba_d_ssm": hf.optional_count(1024),
        "mamba_rms_norm": False,
        "mamba_norm_before_gate": True,
        "projectors_bias": False,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "key_multiplier": 1.0,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
        "ssm_multipliers": hf.Default(None, _make_numbers_kind("five", 5)),
        "mlp_multipliers": hf.Default(None, _make_numbers_kind("two", 2)),
    },
    required_values=bamba.REQUIRED_VALUES,
    ignored_keys=bamba.IGNORED_KEYS | {"mamba_use_mlp", "mlp_expansion_factor"},  # in files, not read by transformers
    ignored_tensors=(*llama.LLAMA.ignored_tensors, r"\.mup_vector$"),
)
