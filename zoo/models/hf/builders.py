"""Factories of layers from the values of a config. Keys are canonical: `zoo.models.hf.config` resolves aliases."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from zoo.layers import (
    MLP,
    AbstractFeedForward,
    AbstractNorm,
    Attention,
    BiasedRouter,
    GatedMLP,
    LayerNorm,
    MixtureOfExperts,
    RMSNorm,
)
from zoo.layers import LatentAttention as Latent
from zoo.layers import Linear as Projection
from zoo.layers.encoders.bidirectional_attention import BidirectionalAttention
from zoo.layers.moe.router import AbstractRouter, check_routing_sizes
from zoo.ops import activations
from zoo.ops.axial_rotary import AxialRotary
from zoo.ops.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    Rotary,
    YarnScaling,
)
from zoo.ops.sectioned_rotary import SectionedRotary
from zoo.parallel import Dim

from ..blocks import ParallelBlock, SandwichBlock
from ..build import LayerFactories, build_decoder
from ..decoder import Decoder
from ..parameter_paths import list_parameter_paths
from ..stack import BlockFactory
from .errors import ConfigError, suggest_nearest
from .spec import Config

_ACTIVATIONS: dict[str, Callable] = {
    **dict.fromkeys(("silu", "swish"), jax.nn.silu),
    **dict.fromkeys(("gelu", "gelu_python"), activations.gelu),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"), activations.gelu_tanh),
    "quick_gelu": activations.quick_gelu,
    "relu": jax.nn.relu,
    "relu2": activations.relu_squared,
    "tanh": jnp.tanh,
}
"""Activations by their names in configs. The names of the tanh approximation of GELU differ in rounding only."""


def find_activation(config: Config, key: str = "hidden_act") -> Callable:
    """Look up an activation by its name in the config. **Raises** `ConfigError` for an unknown one."""
    name = config[key]
    if name not in _ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is none that we know{suggest_nearest(name, _ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def find_activation_name(function: Callable) -> str:
    """Return the config name of an activation. **Raises** `ConfigError` if it has none."""
    names = [name for name, activation in _ACTIVATIONS.items() if activation is function]
    if not names:
        raise ConfigError(f"no config has a word for the activation {function}")
    return names[0]


def read_head_sizes(config: Config) -> tuple[int, int, int]:
    """Return the number of heads, of key-value heads, and the head dim."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim")
    if head_dim is None and config["hidden_size"] % heads:
        raise ConfigError(f"hidden_size = {config['hidden_size']} does not divide evenly over {heads} heads")
    return heads, config.get("num_key_value_heads") or heads, head_dim or config["hidden_size"] // heads


def build_rotary(config: Config, *, interleaved: bool = False, layer_type: str | None = None) -> Rotary:
    """Build RoPE from `rope_parameters`, or from the parameters of a `layer_type` where types have their own.

    **Raises** `ConfigError` for an odd number of rotated channels, and for an `mrope_section` of others.
    """
    rope_parameters = config["rope_parameters"]
    head_dim = read_head_sizes(config)[2]
    if layer_type is not None:
        rope_parameters = rope_parameters[layer_type]
    if rope_parameters["rope_type"] == "proportional":
        pairs = int((rope_parameters.get("partial_rotary_factor") or 1) * head_dim // 2)
        scaling = ProportionalScaling(pairs, rope_parameters.get("factor") or 1)
        return Rotary(head_dim, rope_parameters["rope_theta"], interleaved, scaling)
    dim = int(head_dim * (rope_parameters.get("partial_rotary_factor") or 1))
    if dim < 2 or dim % 2 or dim > head_dim:
        raise ConfigError(
            f"rotary embeddings turn pairs of values, and {dim} of the {head_dim} of each head are to be turned"
        )
    scaling = _build_rope_scaling(config, rope_parameters, dim // 2)
    sections = rope_parameters.get("mrope_section")
    if sections is None:
        return Rotary(dim, rope_parameters["rope_theta"], interleaved, scaling)
    if sum(sections) != dim // 2:
        raise ConfigError(f"mrope_section = {sections} has {sum(sections)} pairs, and {dim // 2} are turned")
    return SectionedRotary(
        *(dim, rope_parameters["rope_theta"], interleaved, scaling),
        sections=tuple(sections),
        alternating=bool(rope_parameters.get("mrope_interleaved")),
    )


def _build_rope_scaling(config: Config, rope_parameters: dict[str, Any], num_pairs: int) -> RopeScaling | None:
    """Build the RoPE scaling of a config. **Raises** `ConfigError` for a wrong number of LongRoPE factors."""
    original = rope_parameters.get("original_max_position_embeddings") or config["max_position_embeddings"]
    given = {key: value for key, value in rope_parameters.items() if value is not None}
    match rope_parameters["rope_type"]:
        case "linear":
            return LinearScaling(rope_parameters["factor"])
        case "dynamic":
            return DynamicScaling(rope_parameters["factor"], config["max_position_embeddings"])
        case "llama3":
            return Llama3Scaling(
                rope_parameters["factor"],
                rope_parameters["low_freq_factor"],
                rope_parameters["high_freq_factor"],
                original,
            )
        case "yarn":
            names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
            return YarnScaling(
                rope_parameters["factor"], original, **{key: given[key] for key in names if key in given}
            )
        case "longrope":
            extension = given.get("factor", config["max_position_embeddings"] / original)
            factors = tuple(rope_parameters["short_factor"]), tuple(rope_parameters["long_factor"])
            if {*map(len, factors)} != {num_pairs}:
                counts = " and ".join(str(len(x)) for x in factors)
                raise ConfigError(f"longrope has {counts} factors, short and long, and {num_pairs} pairs to turn")
            return LongRopeScaling(*factors, original, extension, given.get("attention_factor"))
    return None


def build_layer_rotaries(config: Config, types: Sequence[str]) -> list[Rotary]:
    """Return the RoPE of each layer, from the `rope_parameters` of its type."""
    rotaries = {layer_type: build_rotary(config, layer_type=layer_type) for layer_type in dict.fromkeys(types)}
    return [rotaries[layer_type] for layer_type in types]


def build_axial_rotary(config: Config, **options: Any) -> AxialRotary:
    """Build RoPE by row and column of patches, counted from 0, with these options.

    **Raises** `ConfigError` for heads that do not divide evenly into pairs for both.
    """
    head_dim = read_head_sizes(config)[2]
    if head_dim % 4:
        raise ConfigError(f"heads of {head_dim} features: pairs of them turn by row and by column, so 4 divides them")
    return AxialRotary(head_dim, config["rope_parameters"]["rope_theta"], turn=1.0, **options)


def compute_out_scale(config: Config) -> float:
    """Return 1 / sqrt(2 layers), the initialization scale of matrices that write to the residual stream."""
    return (2 * config["num_hidden_layers"]) ** -0.5


def make_attention_factory(
    config: Config, *, attention: Callable[..., Any] = Attention, **options: Any
) -> Callable[..., Any]:
    """Return a factory of `Attention`, or of another class of `attention`, with these options. Sizes come from the
    config, and RoPE unless given."""
    heads, kv_heads, head_dim = read_head_sizes(config)
    if "rotary" not in options:
        options = {"rotary": build_rotary(config), **options}
    if options.get("window") == 0:
        raise ConfigError("sliding_window = 0: a window holds at least 1 token, its own")
    sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "out_scale": compute_out_scale(config)}
    return partial(attention, config["hidden_size"], heads, **{**sizes, **options})


make_bidirectional_attention_factory = partial(make_attention_factory, attention=BidirectionalAttention, rotary=None)
"""`make_attention_factory` of encoders, without RoPE unless given."""


def make_windowed_attention_factories(
    config: Config, windows: Sequence[int | None], **options: Any
) -> list[Callable[..., Attention]]:
    """Return a factory of `Attention` per layer. Layers with equal sliding windows have one factory object, so that
    they are compiled once."""
    factories = {window: make_attention_factory(config, window=window, **options) for window in dict.fromkeys(windows)}
    return [factories[window] for window in windows]


def make_layerwise_attention_factories(
    config: Config, windows: Sequence[int | None], rotaries: Sequence[Rotary | None], **options: Any
) -> list[Callable[..., Attention]]:
    """Return a factory of `Attention` per layer, with its window and its RoPE. Layers with equal ones have one factory
    object, so that they are compiled once."""
    kinds = list(zip(windows, rotaries, strict=True))
    factories = {
        kind: make_attention_factory(config, window=kind[0], rotary=kind[1], **options) for kind in dict.fromkeys(kinds)
    }
    return [factories[kind] for kind in kinds]


def make_latent_attention_factory(
    config: Config, *, interleaved: bool = False, rotary: Rotary | None = None, **options: Any
) -> Callable[..., Latent]:
    """Return a factory of multi-head latent attention, with the sizes of a DeepSeek config, its RoPE unless `rotary` is
    given, and these options.

    **Raises** `ConfigError` for grouped keys, and for a `head_dim` other than `qk_rope_head_dim`.
    """
    heads = config["num_attention_heads"]
    rope_dim = config["qk_rope_head_dim"]
    if config["num_key_value_heads"] not in (None, heads):
        kv_heads = config["num_key_value_heads"]
        raise ConfigError(f"num_key_value_heads = {kv_heads}, and latent attention has a key for each of {heads} heads")
    if config["head_dim"] not in (None, rope_dim):
        head_dim = config["head_dim"]
        raise ConfigError(f"head_dim = {head_dim}, and it is qk_rope_head_dim = {rope_dim} that is meant by it")
    if rope_dim % 2:
        raise ConfigError(f"qk_rope_head_dim = {rope_dim}: rotary embeddings turn pairs of values")
    if rotary is None:
        rotary = build_rotary(Config(config, head_dim=rope_dim), interleaved=interleaved)
    return partial(
        Latent,
        config["hidden_size"],
        heads,
        latent=config["kv_lora_rank"],
        query_latent=config["q_lora_rank"],
        head_dim=config["qk_nope_head_dim"],
        value_dim=config["v_head_dim"],
        rotary=rotary,
        bias=config["attention_bias"],
        out_scale=compute_out_scale(config),
        **options,
    )


def make_gated_mlp_factory(config: Config, *, width: int | None = None, bias: bool = False) -> Callable[..., GatedMLP]:
    """Return a factory of gated MLPs, of `intermediate_size` unless `width` is given, as for an expert."""
    if width is None:
        width = config["intermediate_size"]
    options = {"activation": find_activation(config), "bias": bias, "out_scale": compute_out_scale(config)}
    return partial(GatedMLP, config["hidden_size"], width, **options)


def make_mlp_factory(config: Config, *, bias: bool = True) -> Callable[..., MLP]:
    """Return a factory of MLPs. `intermediate_size` defaults to four times `hidden_size`."""
    embed = config["hidden_size"]
    sizes = embed, config["intermediate_size"] or 4 * embed
    return partial(MLP, *sizes, activation=find_activation(config), bias=bias, out_scale=compute_out_scale(config))


def make_mixture_factory(
    config: Config,
    router: Callable[..., AbstractRouter],
    experts: int,
    *,
    width: int | None = None,
    expert: Callable[..., AbstractFeedForward] | None = None,
    shared: int | Callable[..., AbstractFeedForward] | None = None,
    gate: bool = False,
    identities: int = 0,
    mixture: Callable[..., Any] = MixtureOfExperts,
) -> Callable[..., Any]:
    """Return a factory of mixtures of gated experts, with top-k routing to `num_experts_per_tok` of them.

    - `router`: a class of `zoo.layers`, or a partial of one with further options.
    - `width`: of an expert, `intermediate_size` by default.
    - `expert`: factory of an expert, if it is not a gated MLP.
    - `shared`: width of a shared expert, which every token uses, or its factory; with a sigmoid gate if `gate`.
    - `identities`: number of zero-computation experts, which a token chooses among, too.
    - `mixture`: its class, if it is not `MixtureOfExperts`, or a partial of one.

    **Raises** `ConfigError` if fewer experts can be chosen than a token needs.
    """
    embed = config["hidden_size"]
    top = config["num_experts_per_tok"]
    sizes = {key: config[key] for key in ("num_experts_per_tok", "n_group", "topk_group") if key in config}
    try:
        check_routing_sizes(experts + identities, top, config.get("n_group", 1), config.get("topk_group", 1))
    except ValueError as error:
        raise ConfigError(f"{', '.join(f'{key} = {value}' for key, value in sizes.items())}: {error}") from None
    if expert is None:
        expert = make_gated_mlp_factory(config, width=width)
    options = {}
    if isinstance(shared, int):
        shared = make_gated_mlp_factory(config, width=shared)
    if shared is not None:
        options["shared"] = shared
    if gate:
        options["shared_gate"] = partial(Projection, embed, 1, in_=Dim("embed"))
    if identities:
        options["identities"] = identities
    return partial(mixture, partial(router, embed, experts + identities, top), expert, experts, **options)


def make_biased_router_factory(config: Config, **options: Any) -> Callable[..., BiasedRouter]:
    """Return a factory of DeepSeek-V3's router: sigmoid scores, a selection bias, and groups of experts. `options` are
    further ones of `BiasedRouter`."""
    groups = {"groups": config["n_group"], "kept_groups": config["topk_group"]}
    scale = config["routed_scaling_factor"]
    return partial(BiasedRouter, renormalize=config["norm_topk_prob"], scale=scale, **groups, **options)


def build_moe_decoder(
    config: Config,
    is_sparse: Sequence[bool],
    experts: Callable[..., MixtureOfExperts],
    *,
    windows: Sequence[int | None] | None = None,
    key: Key[Array, ""],
    **options: Any,
) -> Decoder:
    """Build a decoder of pre-norm layers: a mixture of experts where `is_sparse`, a gated MLP elsewhere.

    - `windows`: sliding window of each layer; full attention by default.
    - `options`: of `Attention`.
    """
    norm = make_rms_norm_factory(config)
    dense = make_gated_mlp_factory(config)
    if windows is None:
        windows = [None] * len(is_sparse)
    mixers = make_windowed_attention_factories(config, windows, **options)
    layers = [(mixer, experts if sparse else dense) for mixer, sparse in zip(mixers, is_sparse, strict=True)]
    return build_config_decoder(config, layers, norm, key=key)


def make_rms_norm_factory(config: Config, **options: Any) -> Callable[[], RMSNorm]:
    """Return a factory of RMSNorms over `hidden_size`."""
    return partial(RMSNorm, config["hidden_size"], epsilon=config["rms_norm_eps"], **options)


def make_head_norm_factory(config: Config, **options: Any) -> Callable[[], RMSNorm]:
    """Return a factory of RMSNorms over the head dim, for QK norm."""
    size = read_head_sizes(config)[2]
    options = {"epsilon": config["rms_norm_eps"], **options}
    return partial(RMSNorm, size, features=Dim("head_dim"), **options)


def make_layer_norm_factory(config: Config, **options: Any) -> Callable[[], LayerNorm]:
    """Return a factory of LayerNorms over `hidden_size`."""
    return partial(LayerNorm, config["hidden_size"], epsilon=config["layer_norm_eps"], **options)


def read_layer_types(config: Config, default: Sequence[str]) -> list[str]:
    """Return the attention type of each layer: `layer_types`, or the `default`. **Raises** `ConfigError` unless it has
    one per layer."""
    types = config["layer_types"]
    if types is None:
        types = default
    if not isinstance(types, list | tuple) or len(types) != config["num_hidden_layers"]:
        raise ConfigError(f"layer_types should name the kind of each of the {config['num_hidden_layers']} layers")
    return list(types)


def pick_mixers(types: Sequence[str], mixers: Mapping[str, Callable[..., Any]]) -> list[Callable[..., Any]]:
    """Return the mixer factory of each layer by its type. **Raises** `ConfigError` for a type that `mixers` lacks."""
    for layer_type in types:
        if layer_type not in mixers:
            raise ConfigError(f"layer_types has {layer_type!r}, and layers here are {' or '.join(mixers)}")
    return [mixers[layer_type] for layer_type in types]


def list_layer_types(is_local: Iterable[Any], local: str = "sliding_attention") -> list[str]:
    """Return the attention type of each layer: `local`, or full attention."""
    return [local if chosen else "full_attention" for chosen in is_local]


def list_patterned_types(config: Config) -> list[str]:
    """Return the default `layer_types` of a config with a `sliding_window_pattern` n: every n-th layer attends to all
    tokens, and the others to a sliding window. "LLLG" spells the pattern 4 out, in local and global layers. 0 and null,
    which transformers writes for a model without windows, are not patterns."""
    pattern = config["sliding_window_pattern"]
    count = config["num_hidden_layers"]
    if not pattern:
        return ["full_attention"] * count
    if isinstance(pattern, str):
        is_local = [pattern[number % len(pattern)] != "G" for number in range(count)]
    else:
        is_local = [number % pattern != pattern - 1 for number in range(count)]
    return list_layer_types(is_local)


def list_layer_windows(types: Sequence[str], window: int | None) -> list[int | None]:
    """Return the sliding window of each layer, None for full attention. **Raises** `ConfigError` for an unknown
    type."""
    windows = {"full_attention": None, "sliding_attention": window}
    for layer_type in types:
        if layer_type not in windows:
            raise ConfigError(f"layer_types has {layer_type!r}, and layers here are {' or '.join(windows)}")
        if layer_type == "sliding_attention" and window is None:
            raise ConfigError("layer_types has sliding_attention, and no sliding_window says how wide")
    return [windows[layer_type] for layer_type in types]


def make_sandwich_block(norm: Callable[[], AbstractNorm]) -> Callable[..., SandwichBlock]:
    """Return a factory of `SandwichBlock` whose norms after the sublayers are made by `norm`."""
    return lambda **parts: SandwichBlock(mixer_post_norm=norm(), ffn_post_norm=norm(), **parts)


def make_one_norm_block(ffn_norm: AbstractNorm, **parts: Any) -> ParallelBlock:
    """Return a `ParallelBlock` whose sublayers read the same norm; the one made for the feed-forward layer is left
    out."""
    return ParallelBlock(ffn_norm=None, **parts)


def set_by_layer(model: Decoder, name: str, compute: Callable[[int], Array]) -> Decoder:
    """Set an array of each layer that has it, by the number of the layer: layers that are scanned together are made
    alike."""
    leaves, structure = jax.tree.flatten(model)
    for number, path in enumerate(list_parameter_paths(model)):
        if path.name == f"layers.*.{name}":
            leaves[number] = jnp.stack([compute(layer) for layer in path.ranges[0]])
    return jax.tree.unflatten(structure, leaves)


def build_config_decoder(
    config: Config,
    layers: Sequence[LayerFactories | BlockFactory],
    norm: Callable[[], Any],
    *,
    key: Key[Array, ""],
    **options: Any,
) -> Decoder:
    """Call `build_decoder` with the sizes of the config."""
    sizes = {"vocab": config["vocab_size"], "embed": config["hidden_size"], "tied": config["tie_word_embeddings"]}
    return build_decoder(layers=layers, norm=norm, key=key, **sizes, **options)
