"""Gemma 4, text (Gemma team, 2026): Gemma 3's layer with norms of values and unscaled scores, larger heads and
proportional RoPE in layers that see all tokens, inputs of each layer besides the residual stream, keys and values that
later layers reuse, and in some models a mixture of experts beside the MLP."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Key

from zoo.layers import AbstractFeedForward, IdentityNorm
from zoo.layers.attention.cross_layer import CrossLayerAttention
from zoo.models.hf import grammar as hf

from . import gemma, gemma2, llama
from .gemma4_text_layers import MixtureBesideMLP, ScaledSoftmaxRouter

_TABLE_PER_LAYER = hf.ValueKind(
    "a table of layer numbers, each with a table of keys and values",
    lambda value: isinstance(value, Mapping) and all(isinstance(x, Mapping) for x in value.values()),
)


def _build_gemma4_text(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    types = _read_types(config)
    width = config["hidden_size_per_layer_input"]
    embed = config["hidden_size"]
    norm = hf.make_rms_norm_factory(config)
    activation = hf.find_activation(config)
    moe = config["enable_moe_block"]
    first = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    wide = config["use_double_wide_mlp"]
    ffn = _make_feed_forward_factory(config, config["intermediate_size"])
    if wide:
        later = _make_feed_forward_factory(config, 2 * config["intermediate_size"])
    else:
        later = ffn
    layers = [(mixer, ffn if n < first else later) for n, mixer in enumerate(make_sharing_mixers(config, types, first))]

    def make_block(inputs: hf.LayerInputProjection | None = None, **parts) -> hf.LayerInputBlock:
        norms = {"mixer_post_norm": norm(), "ffn_post_norm": norm()}
        if moe:
            parts["ffn_norm"] = IdentityNorm()
        return hf.LayerInputBlock(inputs=inputs, layer_scale=jnp.ones(1, jnp.float32), **norms, **parts)

    sizes = config["vocab_size_per_layer_input"], embed, config["num_hidden_layers"], width
    options = {
        "parts": {"inputs": partial(hf.LayerInputProjection, embed, width, norm, activation)} if width else {},
        "layer_inputs": partial(hf.LayerInputs, *sizes, epsilon=config["rms_norm_eps"]),
        "multiplier": embed**0.5,
        "soft_cap": config["final_logit_softcapping"],
    }
    return hf.build_config_decoder(config, layers, norm, block=make_block, key=key, **options)


def _make_feed_forward_factory(config: hf.Config, width: int) -> Callable[..., AbstractFeedForward]:
    """Return a factory of gated MLPs, with a mixture of experts beside them if the config says so.

    **Raises** `ConfigError` for a mixture whose sizes are not given, and for fewer experts than a token needs.
    """
    dense = hf.make_gated_mlp_factory(config, width=width)
    if not config["enable_moe_block"]:
        return dense
    experts, top, expert_width = sizes = [config[key] for key in _MIXTURE_SIZES]
    if None in sizes:
        raise hf.ConfigError(f"enable_moe_block needs {', '.join(_MIXTURE_SIZES)}, and they are {sizes}")
    if top > experts:
        raise hf.ConfigError(f"top_k_experts = {top}, and num_experts = {experts}")
    router = partial(ScaledSoftmaxRouter, config["hidden_size"], experts, top)
    expert = hf.make_gated_mlp_factory(config, width=expert_width)
    return partial(MixtureBesideMLP, dense, router, expert, experts, hf.make_rms_norm_factory(config))


_MIXTURE_SIZES = ("num_experts", "top_k_experts", "moe_intermediate_size")


def _read_types(config: hf.Config) -> list[str]:
    """Return the attention type of each layer. The last one sees all tokens, whatever `layer_types` says."""
    types = hf.read_layer_types(config, hf.list_patterned_types(hf.Config(config, sliding_window_pattern=6)))
    return [*types[:-1], "full_attention"]


def make_sharing_mixers(
    config: hf.Config, types: Sequence[str], first: int
) -> list[Callable[..., CrossLayerAttention]]:
    """Return a factory of attention per layer; from layer `first` on, layers reuse the keys of the last of their type
    before it.

    **Raises** `ConfigError` if there is none.
    """
    windows = hf.list_layer_windows(types, config["sliding_window"])
    reuses = first < len(types)
    first = max(first, 0)
    if reuses and (missing := sorted({*types[first:]} - {*types[:first]})):
        raise hf.ConfigError(
            f"num_kv_shared_layers leaves no layer of {missing[0]} whose keys the later ones could reuse"
        )
    last = {}
    if reuses:
        last = {kind: number for number, kind in enumerate(types[:first])}
    factories = {}
    mixers = []
    for number, (kind, window) in enumerate(zip(types, windows, strict=True)):
        head_dim, kv_heads = _read_layer_sizes(config, number, kind)
        if number >= first:
            role = "reuses"
        elif last.get(kind) == number:
            role = "stores"
        else:
            role = None
        signature = kind, head_dim, kv_heads, role
        if signature not in factories:
            own = hf.Config(config, head_dim=head_dim)
            value_norm = hf.make_head_norm_factory(own, scaled=False)
            factories[signature] = hf.make_attention_factory(
                own,
                attention=CrossLayerAttention,
                kv_heads=kv_heads,
                rotary=hf.build_rotary(own, layer_type=kind),
                window=window,
                scale=1.0,
                qk_norm=hf.make_head_norm_factory(own),
                value_norm=value_norm,
                key_is_value=config["attention_k_eq_v"] and kind == "full_attention",
                **dict.fromkeys(("bias", "out_bias"), config["attention_bias"]),
                **({} if role is None else {role: kind}),
            )
        mixers.append(factories[signature])
    return mixers


def _read_layer_sizes(config: hf.Config, number: int, kind: str) -> tuple[int, int]:
    """Return the head dim and the number of KV heads of a layer: of `per_layer_config`, by number, if there is one.

    **Raises** `ConfigError` for other keys there, and for layers that see all tokens without a head dim.
    """
    own: dict = {}
    if config["per_layer_config"] is not None:
        own = dict(config["per_layer_config"].get(str(number), {}))
    elif kind == "full_attention":
        if config["global_head_dim"] is None:
            raise hf.ConfigError("global_head_dim is null, and layers of full_attention need one")
        own = {"head_dim": config["global_head_dim"]}
        if config["attention_k_eq_v"] and config["num_global_key_value_heads"] is not None:
            own["num_key_value_heads"] = config["num_global_key_value_heads"]
    if unknown := sorted(own.keys() - {"head_dim", "num_key_value_heads"}):
        raise hf.ConfigError(
            f"per_layer_config has {unknown[0]!r}, and layers differ in head_dim and num_key_value_heads"
        )
    _, kv_heads, head_dim = hf.read_head_sizes(config)
    return own.get("head_dim", head_dim), own.get("num_key_value_heads", kv_heads)


MIXER_NAMES: hf.NameMap = {
    **hf.prefixed("self_attn", "cross_layer_attention", llama.ATTENTION_NAMES),
    "per_layer_input_gate": "inputs.gate",
    "per_layer_projection": "inputs.out",
    "post_per_layer_input_norm": "inputs.norm",
}
"""Attention, and inputs of a layer."""
INPUT_NAMES: hf.NameMap = {
    "model.embed_tokens_per_layer": "embedding",
    "model.per_layer_model_projection": "projection",
    "model.per_layer_projection_norm": "norm",
}
"""Inputs of all layers."""


def _map_gemma4_text_names(config: hf.Config) -> hf.NameMap:
    norms = gemma2.NORM_NAMES
    feed_forward = hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES)
    if config["enable_moe_block"]:
        norms = {name: part for name, part in norms.items() if part != "ffn_norm"}
        feed_forward = hf.prefixed("", "mixture_beside_mlp", _MIXTURE_NAMES)
    layers = llama.map_llama_layers(feed_forward, {**MIXER_NAMES, "layer_scalar": "layer_scale"}, norms)
    return {**layers, **hf.prefixed("", "layer_inputs", INPUT_NAMES)}


_MIXTURE_NAMES: hf.NameMap = {
    **hf.prefixed("mlp", "dense", llama.GATED_MLP_NAMES),
    **hf.prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES),
    "router.proj": "router.scores",
    "router.scale": "router_norm.weight",
    "router.per_expert_scale": "router.expert_scale",
    "pre_feedforward_layernorm": "dense_norm",
    "post_feedforward_layernorm_1": "dense_post_norm",
    "pre_feedforward_layernorm_2": "experts_norm",
    "post_feedforward_layernorm_2": "experts_post_norm",
}


def find_reused_projections(config: hf.Config, tensors: Collection[str]) -> list[str]:
    """Return the key and value projections and norms that files hold for layers that reuse another layer's."""
    layers = config["num_hidden_layers"]
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    reusing = range(layers - config["num_kv_shared_layers"], layers)
    parts = [f"layers.{number}.self_attn.{name}." for number in reusing for name in names]
    return [name for name in tensors if any(part in name for part in parts)]


GEMMA4_TEXT = hf.Family(
    name="gemma4_text",
    architecture="Gemma4ForCausalLM",
    build=_build_gemma4_text,
    names=_map_gemma4_text_names,
    defaults={
        **gemma.DEFAULTS,
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": hf.optional_count(4),
        "max_position_embeddings": 131072,
        "final_logit_softcapping": hf.optional_number(),
        "layer_types": hf.optional_words(),
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 10000.0},
            "full_attention": {"rope_theta": 1000000.0, "rope_type": "proportional", "partial_rotary_factor": 0.25},
        },
        "sliding_window": hf.optional_non_negative(512),
        "hidden_size_per_layer_input": hf.non_negative(256),
        "vocab_size_per_layer_input": 262144,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": hf.non_negative(0),
        "use_double_wide_mlp": False,
        "global_head_dim": 512,
        "num_global_key_value_heads": hf.optional_count(),
        "per_layer_config": hf.Default(None, hf.optional(_TABLE_PER_LAYER)),
        "enable_moe_block": False,
        **dict.fromkeys(_MIXTURE_SIZES, hf.optional_count()),
    },
    aliases={"hidden_activation": "hidden_act"},
    required_values={"use_bidirectional_attention": (None, "vision")},
    ignored_tensors=llama.LLAMA.ignored_tensors,
    find_ignored_tensors=find_reused_projections,
)
