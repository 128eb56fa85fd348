"""Nemotron-H and Nemotron 3 (NVIDIA, arXiv:2504.03624; "Nemotron 3", 2025): every layer is one sublayer, Mamba-2, an
MLP of squared ReLUs, a mixture of such MLPs, or attention without positions. So are the layers of its modules of
multi-token prediction."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import MLP, Mamba2, MixtureOfExperts
from zoo.models.hf import grammar as hf

from . import llama
from .mamba2 import MIXER_NAMES
from .nemotron_h_layers import LatentMixture

_TYPES_BY_LETTER = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_PATTERN = hf.ValueKind(
    "a word of the letters M, *, - and E", lambda value: hf.WORD.fits(value) and set(value) <= _TYPES_BY_LETTER.keys()
)
_OLDER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}


def _build_nemotron_h(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    types = _read_layer_types(config)
    # the keys that builders read; a layer has one matrix that writes to the residual stream, not two
    config = hf.Config(config, num_hidden_layers=len(types), rms_norm_eps=config["layer_norm_epsilon"])
    out_scale = len(types) ** -0.5
    layers: dict[str, hf.LayerFactories] = {}
    if "linear_attention" in types:
        layers["linear_attention"] = _make_mamba2_factory(config, out_scale), None
    if "full_attention" in types:
        layers["full_attention"] = hf.make_attention_factory(config, rotary=None, out_scale=out_scale), None
    if "mlp" in types:
        layers["mlp"] = None, _make_mlp_factory(config, config["hidden_size"], config["intermediate_size"], out_scale)
    if "moe" in types:
        layers["moe"] = None, _make_experts_factory(config, out_scale)
    return hf.build_config_decoder(config, [layers[kind] for kind in types], hf.make_rms_norm_factory(config), key=key)


def _read_layer_types(config: hf.Config) -> list[str]:
    """Return the type of each layer: `layers_block_type`, else the letters of `hybrid_override_pattern`. Their number
    is the number of layers.

    **Raises** `ConfigError` for unknown types, and for no layers.
    """
    given: Sequence[str] | None = config["layers_block_type"]
    pattern = config["hybrid_override_pattern"]
    if given is not None:
        types = [_OLDER_TYPES.get(kind, kind) for kind in given]
    elif pattern is not None:
        types = [_TYPES_BY_LETTER[letter] for letter in pattern]
    else:
        types = ["linear_attention", "moe", "full_attention", "mlp"]
    known = _TYPES_BY_LETTER.values()
    if unknown := [kind for kind in types if kind not in known]:
        raise hf.ConfigError(f"layers_block_type has {unknown[0]!r}, and layers here are {' or '.join(known)}")
    if not types:
        raise hf.ConfigError("layers_block_type or hybrid_override_pattern should have at least one layer")
    return types


def _make_mamba2_factory(config: hf.Config, out_scale: float) -> Callable[..., Mamba2]:
    """Return a factory of `Mamba2`. **Raises** `ConfigError` if groups do not divide heads."""
    heads = config["mamba_num_heads"]
    groups = config["n_groups"]
    if heads % groups:
        raise hf.ConfigError(f"mamba_num_heads = {heads} heads do not divide evenly over n_groups = {groups}")
    return partial(
        Mamba2,
        config["hidden_size"],
        heads,
        head_dim=config["mamba_head_dim"],
        groups=groups,
        state_dim=config["ssm_state_size"],
        conv_width=config["conv_kernel"],
        bias=config["use_bias"],
        conv_bias=config["use_conv_bias"],
        epsilon=config["rms_norm_eps"],
        dt_limit=(config["time_step_min"], float("inf")),
        out_scale=out_scale,
    )


def _make_mlp_factory(config: hf.Config, embed: int, width: int, out_scale: float) -> Callable[..., MLP]:
    """Return a factory of MLPs of a width, from and to `embed` channels."""
    activation = hf.find_activation(config, "mlp_hidden_act")
    return partial(MLP, embed, width, activation=activation, bias=config["mlp_bias"], out_scale=out_scale)


def _make_experts_factory(config: hf.Config, out_scale: float) -> hf.FeedForwardFactory:
    """Return a factory of the mixture of experts, and its shared one. Experts have no biases."""
    embed = config["hidden_size"]
    latent = config["moe_latent_size"]
    without_bias = hf.Config(config, mlp_bias=False)
    if latent is None:
        mixture = MixtureOfExperts
        expert = _make_mlp_factory(without_bias, embed, config["moe_intermediate_size"], out_scale)
    else:
        mixture = partial(LatentMixture, embed=embed, latent=latent, bias=config["mlp_bias"], out_scale=out_scale)
        expert = _make_mlp_factory(without_bias, latent, config["moe_intermediate_size"], out_scale)
    shared = _make_mlp_factory(config, embed, config["moe_shared_expert_intermediate_size"], out_scale)
    parts = {"expert": expert, "shared": shared, "mixture": mixture}
    return hf.make_mixture_factory(config, hf.make_biased_router_factory(config), config["n_routed_experts"], **parts)


def _map_nemotron_h_names(config: hf.Config) -> hf.NameMap:
    return _map_nemotron_h_layers(config, hf.prefixed("experts.*", "experts.*", _MLP_NAMES))


def _map_nemotron_h_memory_names(config: hf.Config) -> hf.NameMap:
    experts: hf.NameMap = {"up_proj": "up.weight", "down_proj": "down.weight"}
    names = _map_nemotron_h_layers(config, hf.prefixed("experts", "experts.*", experts))
    return {re.sub(r"^backbone\.", "model.", name): mapping for name, mapping in names.items()}


def _map_nemotron_h_layers(config: hf.Config, experts: hf.NameMap) -> hf.NameMap:
    mixture = {
        "gate": "router.scores",
        "gate.e_score_correction_bias": "router.selection_bias",
        **experts,
        **hf.prefixed("shared_experts", "shared", _MLP_NAMES),
    }
    if config["moe_latent_size"] is None:
        mixture = hf.prefixed("", "mixture_of_experts", mixture)
    else:
        latents = {"fc1_latent_proj": "down", "fc2_latent_proj": "up"}
        mixture = hf.prefixed("", "latent_mixture", {**mixture, **latents})
    mixer = {
        **hf.prefixed("", "mamba2", MIXER_NAMES),
        **hf.prefixed("", "attention", llama.ATTENTION_NAMES),
        **hf.prefixed("", "mlp", _MLP_NAMES),
        **mixture,
    }
    block = {"norm": "mixer_norm", **hf.prefixed("mixer", "", mixer)}
    shell = {"embeddings": "embedding", "norm_f": "norm", **hf.prefixed("layers.*", "layers.*", block)}
    return {**hf.prefixed("backbone", "", shell), "lm_head": "head"}


_MLP_NAMES: hf.NameMap = {"up_proj": "up", "down_proj": "down"}


def _name_nemotron_h_predictor(config: hf.Config, number: int) -> dict[str, str]:
    count = len(_read_layer_types(hf.Config(config, **_take_predictor_layers(config))))
    first = number * count
    last = first + count - 1
    return {
        **{f"mtp.layers.{first + i}": f"layers.{i}" for i in range(count)},
        f"mtp.layers.{first}.enorm": "embedding_norm",
        f"mtp.layers.{first}.hnorm": "state_norm",
        f"mtp.layers.{first}.eh_proj": "projection",
        f"mtp.layers.{last}.final_layernorm": "norm",
    }


def _take_predictor_layers(config: hf.Config) -> dict[str, Any]:
    given = config["mtp_layers_block_type"]
    pattern = config["mtp_hybrid_override_pattern"]
    if given is None and pattern is None:
        pattern = "*E"
    return {"layers_block_type": given, "hybrid_override_pattern": pattern}


NEMOTRON_H = hf.Family(
    name="nemotron_h",
    architecture="NemotronHForCausalLM",
    build=_build_nemotron_h,
    names=_map_nemotron_h_names,
    defaults={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "layers_block_type": hf.optional_words(),
        "hybrid_override_pattern": hf.Default(None, hf.optional(_PATTERN)),
        "mtp_layers_block_type": hf.optional_words(),
        "mtp_hybrid_override_pattern": hf.Default(None, hf.optional(_PATTERN)),
        "num_attention_heads": 32,
        "num_key_value_heads": hf.optional_count(8),
        "head_dim": hf.optional_count(128),
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "time_step_min": hf.Default(0.001, hf.NON_NEGATIVE_NUMBER),
        "use_conv_bias": True,
        "use_bias": False,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": hf.optional_count(),
        "routed_scaling_factor": hf.Default(1.0, hf.POSITIVE_NUMBER),
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "layer_norm_epsilon": hf.Default(1e-5, hf.NON_NEGATIVE_NUMBER),
        "tie_word_embeddings": False,
    },
    aliases={
        "num_local_experts": "n_routed_experts",
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_min": "time_step_min",
        "mamba_conv_bias": "use_conv_bias",
    },
    required_values={
        "mamba_hidden_act": ("silu", "swish"),  # the kernels have no other
        "tie_word_embeddings": (False,),  # the class has no tied weights
        "attention_bias": (False,),
        "sliding_window": (None,),
    },
    ignored_keys=frozenset(
        {
            "num_hidden_layers",  # the types of layers say how many there are
            *("rms_norm_eps", "time_step_limit", "mamba_dt_limit"),  # in files, but transformers does not read them
            *("mamba_proj_bias", "expand", "mamba_expand", "n_shared_experts"),  # nor these
            "max_position_embeddings",  # training length, which no layer reads
            *("time_step_max", "time_step_floor", "mamba_dt_max", "mamba_dt_init_floor"),  # initialization
            "rescale_prenorm_residual",  # initialization
            *("chunk_size", "mamba_chunk_size", "use_mamba_kernels", "num_logits_to_keep"),  # implementation
            "moe_shared_expert_overlap",  # implementation
            *("residual_in_fp32", "mamba_ssm_cache_dtype"),  # residuals have the activation dtype, states are float32
            "num_nextn_predict_layers",  # the tensors say how many there are
        }
    ),
    other_modules=(r"^mtp\.",),
    embedding="backbone.embeddings",
    memory_modules={"model": "backbone"},
    memory_names=_map_nemotron_h_memory_names,
    predictors=hf.PredictorFacts(_name_nemotron_h_predictor, _take_predictor_layers),
)
