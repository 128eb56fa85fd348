"""Gemma 3n, text (Gemma team, "Gemma 3n", 2025): four residual streams, of which each layer computes one and updates
all (AltUp); low-rank residual connections (LAuReL); MLPs whose gates are sparse in the first layers; and Gemma 4's
inputs of each layer, norms of values, and keys and values that later layers reuse."""

from functools import partial

import jax
from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import gemma, gemma2, gemma3_text, gemma4_text, llama
from .gemma3n_text_layers import AltUp, AltUpBlock, AltUpInputs, AltUpNorm, GaussianTopK, Laurel

_NUM_INPUTS = hf.ValueKind(  # each is a matrix to build
    "a whole number from 1 to 1024", lambda value: hf.COUNT.fits(value) and value <= 1024
)
_SPARSITY = hf.ValueKind("a number from 0 to below 1", lambda value: hf.NON_NEGATIVE_NUMBER.fits(value) and value < 1)


def _build_gemma3n_text(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    embed = config["hidden_size"]
    count = config["num_hidden_layers"]
    width = config["hidden_size_per_layer_input"]
    streams = config["altup_num_inputs"]
    active = config["altup_active_idx"]
    if active >= streams:
        raise hf.ConfigError(f"altup_active_idx = {active} is none of the altup_num_inputs = {streams} streams, from 0")
    if not width:
        raise hf.ConfigError("hidden_size_per_layer_input = 0, and these layers have inputs of their own")
    types = hf.read_layer_types(config, hf.list_patterned_types(hf.Config(config, sliding_window_pattern=5)))
    sizes = hf.Config(config, per_layer_config={}, attention_k_eq_v=False)  # one head_dim for all layers
    mixers = gemma4_text.make_sharing_mixers(sizes, types, count - config["num_kv_shared_layers"])
    norm = hf.make_rms_norm_factory(config)

    def make_block(**parts) -> AltUpBlock:
        return AltUpBlock(mixer_post_norm=norm(), ffn_post_norm=norm(), **parts)

    options = {
        "parts": {
            "altup": partial(AltUp, embed, streams, norm, active=active, scales_output=config["altup_correct_scale"]),
            "laurel": partial(Laurel, embed, config["laurel_rank"], norm),
            "inputs": partial(hf.LayerInputProjection, embed, width, norm, hf.find_activation(config)),
        },
        "layer_inputs": partial(
            AltUpInputs,
            *(config["vocab_size_per_layer_input"], embed, count, width),
            streams=streams,
            epsilon=config["rms_norm_eps"],
        ),
        "final_norm": partial(AltUpNorm, embed, streams, norm, key=jax.random.fold_in(key, 1)),
        "multiplier": embed**0.5,
        "soft_cap": config["final_logit_softcapping"],
    }
    layers = list(zip(mixers, _make_feed_forwards(config), strict=True))
    return hf.build_config_decoder(config, layers, norm, block=make_block, key=key, **options)


def _make_feed_forwards(config: hf.Config) -> list[hf.FeedForwardFactory]:
    """Return a factory of MLPs per layer, of its own width and sparsity. **Raises** `ConfigError` unless there is one
    of each per layer."""
    count, widths, sparsities = (
        config[key] for key in ("num_hidden_layers", "intermediate_size_by_layer", "activation_sparsity_pattern")
    )
    if isinstance(widths, int):
        widths = [widths] * count
    if sparsities is None:
        sparsities = [0.95 if number < 10 < count else 0.0 for number in range(count)]
    for key, values in {"intermediate_size": widths, "activation_sparsity_pattern": sparsities}.items():
        if len(values) != count:
            raise hf.ConfigError(f"{key} has {len(values)} entries, for {count} layers")
    kinds = list(zip(widths, sparsities, strict=True))
    activation = hf.find_activation(config)
    factories = {
        (width, sparsity): partial(
            hf.make_gated_mlp_factory(config, width=width),
            activation=GaussianTopK(sparsity, activation) if sparsity else activation,
        )
        for width, sparsity in dict.fromkeys(kinds)
    }
    return [factories[kind] for kind in kinds]


def _map_gemma3n_text_names(config: hf.Config) -> hf.NameMap:
    altup = {
        "modality_router": "router",
        "router_norm": "router_norm",
        "prediction_coefs": "prediction",
        "correction_coefs": "correction",
        "correct_output_scale": "output_scale",
    }
    laurel = {"linear_left": "left", "linear_right": "right", "post_laurel_norm": "norm"}
    mixer = {
        **gemma4_text.MIXER_NAMES,
        **hf.prefixed("altup", "altup", altup),
        **hf.prefixed("laurel", "laurel", laurel),
    }
    feed_forward = hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES)
    shell = {"model.norm": "norm.norm", **hf.prefixed("", "layer_inputs.inputs", gemma4_text.INPUT_NAMES)}
    for number in range(config["altup_num_inputs"] - 1):
        shell[f"model.altup_projections.{number}"] = f"layer_inputs.projections.{number}"
        shell[f"model.altup_unembed_projections.{number}"] = f"norm.projections.{number}"
    return {**llama.map_llama_layers(feed_forward, mixer, gemma2.NORM_NAMES), **shell}


GEMMA3N_TEXT = hf.Family(
    name="gemma3n_text",
    architecture="Gemma3nForCausalLM",
    build=_build_gemma3n_text,
    names=_map_gemma3n_text_names,
    defaults={
        **hf.omit(gemma.DEFAULTS, "intermediate_size"),
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size_by_layer": hf.Default(16384, hf.COUNT_PER_LAYER),
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": hf.optional_count(2),
        "max_position_embeddings": 32768,
        "final_logit_softcapping": hf.optional_number(30.0),
        "layer_types": hf.optional_words(),
        "rope_parameters": gemma3_text.GEMMA3_TEXT.defaults["rope_parameters"],
        "sliding_rope_theta": hf.optional_number(),
        "sliding_window": hf.optional_non_negative(512),
        "hidden_size_per_layer_input": hf.non_negative(256),
        "vocab_size_per_layer_input": 262144,
        "num_kv_shared_layers": hf.non_negative(15),
        "altup_num_inputs": hf.Default(4, _NUM_INPUTS),
        "altup_active_idx": hf.non_negative(0),
        "altup_correct_scale": True,
        "laurel_rank": 64,
        "activation_sparsity_pattern": hf.Default(None, hf.optional(hf.list_of(_SPARSITY))),
    },
    aliases={
        "hidden_activation": "hidden_act",
        "intermediate_size": "intermediate_size_by_layer",
        "rope_local_base_freq": "sliding_rope_theta",
    },
    required_values={"hidden_act": (None, "gelu_pytorch_tanh")},
    # coefficients are clipped only in training, and scores are not scaled, whatever the file says
    ignored_keys=frozenset({"altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    find_ignored_tensors=gemma4_text.find_reused_projections,
)
