"""Makers of layers from the values of a config: what the families share. Keys are in their usual words (`config`)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Key

from zoo.layers import (
    MLP,
    AbstractFeedForward,
    AbstractRouter,
    Attention,
    BiasedRouter,
    GatedMLP,
    LayerNorm,
    MixtureOfExperts,
    RMSNorm,
)
from zoo.layers import LatentAttention as Latent
from zoo.layers import Linear as Projection
from zoo.layers.moe.router import check_routing_sizes
from zoo.ops import activations
from zoo.ops.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    Rotary,
    YarnScaling,
)
from zoo.parallel import Dim

from ..blocks import Block
from ..build import build_decoder, make_block_factory, share_factories
from ..decoder import Decoder
from ..stack import BlockFactory
from .config import ConfigError, suggest_nearest
from .spec import Config

_ACTIVATIONS: dict[str, Callable] = {
    **dict.fromkeys(("silu", "swish"), jax.nn.silu),
    **dict.fromkeys(("gelu", "gelu_python"), activations.gelu),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"), activations.gelu_tanh),
    "relu": jax.nn.relu,
    "relu2": activations.relu_squared,
}
"""What configs call activations. Several words for the tanh form of gelu differ in rounding only."""


def _find_activation(config: Config) -> Callable:
    """**Raises** `ConfigError` for a word that is not in `ACTIVATIONS`."""
    word = config["hidden_act"]
    if word not in _ACTIVATIONS:
        raise ConfigError(f"activation {word!r} is none that we know{suggest_nearest(word, _ACTIVATIONS)}")
    return _ACTIVATIONS[word]


def find_activation_name(function: Callable) -> str:
    """What a config calls an activation. **Raises** `ConfigError` for one that it has no word for."""
    words = [word for word, known in _ACTIVATIONS.items() if known is function]
    if not words:
        raise ConfigError(f"no config has a word for the activation {function}")
    return words[0]


def read_head_sizes(config: Config) -> tuple[int, int, int]:
    """How many heads, how many keys and values they share, and how wide they are."""
    count = config["num_attention_heads"]
    wide = config.get("head_dim")
    if wide is None and config["hidden_size"] % count:
        raise ConfigError(f"hidden_size = {config['hidden_size']} does not share out over {count} heads")
    return count, config.get("num_key_value_heads") or count, wide or config["hidden_size"] // count


def build_rotary(config: Config, *, interleaved: bool = False) -> Rotary:
    """The rotary embedding that `rope_parameters` describes."""
    facts = config["rope_parameters"]
    dim = int(read_head_sizes(config)[2] * (facts.get("partial_rotary_factor") or 1))
    if dim < 2 or dim % 2 or dim > read_head_sizes(config)[2]:
        raise ConfigError(
            f"rotary embeddings turn pairs of values, and {dim} of the {read_head_sizes(config)[2]} of each head are to be turned"
        )
    return Rotary(dim, facts["rope_theta"], interleaved, _build_rope_scaling(config, facts, dim // 2))


def _build_rope_scaling(config: Config, rope_parameters: dict[str, Any], num_pairs: int) -> RopeScaling | None:
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
            named = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
            return YarnScaling(
                rope_parameters["factor"], original, **{key: given[key] for key in named if key in given}
            )
        case "longrope":
            longer = given.get("factor", config["max_position_embeddings"] / original)
            sets = tuple(rope_parameters["short_factor"]), tuple(rope_parameters["long_factor"])
            if {*map(len, sets)} != {num_pairs}:
                given_sizes = " and ".join(str(len(factors)) for factors in sets)
                raise ConfigError(f"longrope has {given_sizes} factors, short and long, and {num_pairs} pairs to turn")
            return LongRopeScaling(*sets, original, longer, given.get("attention_factor"))
    return None


def compute_out_scale(config: Config) -> float:
    """By how much new matrices that write to the residual stream are smaller, as in `Transformer`: a layer has two."""
    return (2 * config["num_hidden_layers"]) ** -0.5


def make_attention_factory(config: Config, **options: Any) -> Callable[..., Attention]:
    """Options as `Attention` takes them; sizes come from the config, and the rotation unless given."""
    count, kv_heads, head_dim = read_head_sizes(config)
    options = {"rotary": build_rotary(config), **options} if "rotary" not in options else options
    if options.get("window") == 0:
        raise ConfigError("sliding_window = 0: a window holds at least 1 token, its own")
    sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "out_scale": compute_out_scale(config)}
    return partial(Attention, config["hidden_size"], count, **{**sizes, **options})


def make_latent_attention_factory(config: Config, *, interleaved: bool) -> Callable[..., Latent]:
    """Sizes and the rotation come from the config, in DeepSeek's words.

    **Raises** `ConfigError` where heads would share keys, and where `head_dim` is not the part of them that turns.
    """
    count, turned = config["num_attention_heads"], config["qk_rope_head_dim"]
    if config["num_key_value_heads"] not in (None, count):
        given = config["num_key_value_heads"]
        raise ConfigError(f"num_key_value_heads = {given}, and latent attention has a key for each of {count} heads")
    if config["head_dim"] not in (None, turned):
        raise ConfigError(f"head_dim = {config['head_dim']}, and it is qk_rope_head_dim = {turned} that is meant by it")
    if turned % 2:
        raise ConfigError(f"qk_rope_head_dim = {turned}: rotary embeddings turn pairs of values")
    return partial(
        Latent,
        config["hidden_size"],
        count,
        latent=config["kv_lora_rank"],
        query_latent=config["q_lora_rank"],
        head_dim=config["qk_nope_head_dim"],
        value_dim=config["v_head_dim"],
        rotary=build_rotary(Config(config, head_dim=turned), interleaved=interleaved),
        bias=config["attention_bias"],
        out_scale=compute_out_scale(config),
    )


def make_gated_mlp_factory(config: Config, *, width: int | None = None, bias: bool = False) -> Callable[..., GatedMLP]:
    """`width` is that of the config unless given: an expert has its own."""
    sizes = config["hidden_size"], config["intermediate_size"] if width is None else width
    return partial(
        GatedMLP, *sizes, activation=_find_activation(config), bias=bias, out_scale=compute_out_scale(config)
    )


def make_mlp_factory(config: Config, *, bias: bool = True) -> Callable[..., MLP]:
    """`intermediate_size` is four times `hidden_size` where it is not given."""
    embed = config["hidden_size"]
    sizes = embed, config["intermediate_size"] or 4 * embed
    return partial(MLP, *sizes, activation=_find_activation(config), bias=bias, out_scale=compute_out_scale(config))


def make_mixture_factory(
    config: Config,
    router: Callable[..., AbstractRouter],
    experts: int,
    *,
    width: int | None = None,
    expert: Callable[..., AbstractFeedForward] | None = None,
    shared: int | None = None,
    gate: bool = False,
) -> Callable[..., MixtureOfExperts]:
    """So many gated experts of this `width`, of which a token goes to `num_experts_per_tok`.

    - `router`: a class of `zoo.layers`, or a partial of one with options of its own.
    - `expert`: makes one of another kind.
    - `shared`: the width of an expert that every token uses, with a gate of its own if `gate`.

    **Raises** `ConfigError` where a token cannot go to so many experts.
    """
    embed, top = config["hidden_size"], config["num_experts_per_tok"]
    told = {key: config[key] for key in ("num_experts_per_tok", "n_group", "topk_group") if key in config}
    try:
        check_routing_sizes(experts, top, config.get("n_group", 1), config.get("topk_group", 1))
    except ValueError as error:
        raise ConfigError(f"{', '.join(f'{key} = {value}' for key, value in told.items())}: {error}") from None
    return partial(
        MixtureOfExperts,
        partial(router, embed, experts, top),
        make_gated_mlp_factory(config, width=width) if expert is None else expert,
        experts,
        shared=None if shared is None else make_gated_mlp_factory(config, width=shared),
        shared_gate=partial(Projection, embed, 1, in_=Dim("embed")) if gate else None,
    )


def make_biased_router_factory(config: Config) -> Callable[..., BiasedRouter]:
    """DeepSeek-V3's: sigmoid scores, a bias that only chooses, groups of experts."""
    groups = {"groups": config["n_group"], "kept_groups": config["topk_group"]}
    scale = config["routed_scaling_factor"]
    return partial(BiasedRouter, renormalize=config["norm_topk_prob"], scale=scale, **groups)


def build_moe_decoder(
    config: Config,
    sparse: Sequence[bool],
    experts: Callable[..., MixtureOfExperts],
    *,
    windows: Sequence[int | None] | None = None,
    key: Key[Array, ""],
    **options: Any,
) -> Decoder:
    """Pre-norm layers whose feed-forward part is a mixture where `sparse` says so, and a gated one in the others; with
    a window each, and attention of these options."""
    norm, dense = make_rms_norm_factory(config), make_gated_mlp_factory(config)

    def kind(value: tuple[bool, int | None]) -> BlockFactory:
        is_sparse, window = value
        mixer = make_attention_factory(config, window=window, **options)
        return make_block_factory(Block, norm=norm, mixer=mixer, ffn=experts if is_sparse else dense)

    seen = [None] * len(sparse) if windows is None else windows
    return build_config_decoder(config, share_factories(zip(sparse, seen, strict=True), kind), norm, key=key)


def make_rms_norm_factory(config: Config, **options: Any) -> Callable[[], RMSNorm]:
    return partial(RMSNorm, config["hidden_size"], epsilon=config["rms_norm_eps"], **options)


def make_head_norm_factory(config: Config) -> Callable[[], RMSNorm]:
    """A norm over the width of one head."""
    return partial(RMSNorm, read_head_sizes(config)[2], features=Dim("head_dim"), epsilon=config["rms_norm_eps"])


def make_layer_norm_factory(config: Config, **options: Any) -> Callable[[], LayerNorm]:
    return partial(LayerNorm, config["hidden_size"], epsilon=config["layer_norm_eps"], **options)


def read_layer_types(config: Config, default: Sequence[str]) -> list[str]:
    """The kind of each layer: as `layer_types` has them, or the `usual`. **Raises** `ConfigError` for another number of
    them than layers."""
    found = default if config["layer_types"] is None else config["layer_types"]
    if not isinstance(found, list | tuple) or len(found) != config["num_hidden_layers"]:
        raise ConfigError(f"layer_types should name the kind of each of the {config['num_hidden_layers']} layers")
    return list(found)


def list_layer_windows(types: Sequence[str], window: int | None) -> list[int | None]:
    """The window of each layer of these types. **Raises** `ConfigError` for an unknown type."""
    known = {"full_attention": None, "sliding_attention": window}
    for kind in types:
        if kind not in known:
            raise ConfigError(f"layer_types has {kind!r}, and layers here are {' or '.join(known)}")
        if kind == "sliding_attention" and window is None:
            raise ConfigError("layer_types has sliding_attention, and no sliding_window says how wide")
    return [known[kind] for kind in types]


def build_config_decoder(
    config: Config, factories: Sequence[BlockFactory], norm: Callable[[], Any], *, key: Key[Array, ""], **options: Any
) -> Decoder:
    """`assemble` with the sizes of the config."""
    sizes = {"vocab": config["vocab_size"], "embed": config["hidden_size"], "tied": config["tie_word_embeddings"]}
    return build_decoder(factories=factories, norm=norm, key=key, **sizes, **options)
