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
from zoo.layers.router import check
from zoo.ops import activations
from zoo.ops.rotary import Dynamic, Linear, Llama3, LongRope, Rotary, Scaling, Yarn
from zoo.parallel import Dim

from .assemble import assemble, kinds_of, layer
from .blocks import Block
from .config import ConfigError, nearest
from .decoder import Decoder
from .facts import Config
from .stack import Kind

ACTIVATIONS: dict[str, Callable] = {
    **dict.fromkeys(("silu", "swish"), jax.nn.silu),
    **dict.fromkeys(("gelu", "gelu_python"), activations.gelu),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"), activations.gelu_tanh),
    "relu": jax.nn.relu,
    "relu2": activations.relu_squared,
}
"""What configs call activations. Several words for the tanh form of gelu differ in rounding only."""


def activation(config: Config) -> Callable:
    """**Raises** `ConfigError` for a word that is not in `ACTIVATIONS`."""
    word = config["hidden_act"]
    if word not in ACTIVATIONS:
        raise ConfigError(f"activation {word!r} is none that we know{nearest(word, ACTIVATIONS)}")
    return ACTIVATIONS[word]


def word_of(function: Callable) -> str:
    """What a config calls an activation. **Raises** `ConfigError` for one that it has no word for."""
    words = [word for word, known in ACTIVATIONS.items() if known is function]
    if not words:
        raise ConfigError(f"no config has a word for the activation {function}")
    return words[0]


def heads(config: Config) -> tuple[int, int, int]:
    """How many heads, how many keys and values they share, and how wide they are."""
    count = config["num_attention_heads"]
    wide = config.get("head_dim")
    if wide is None and config["hidden_size"] % count:
        raise ConfigError(f"hidden_size = {config['hidden_size']} does not share out over {count} heads")
    return count, config.get("num_key_value_heads") or count, wide or config["hidden_size"] // count


def rotary(config: Config, *, interleaved: bool = False) -> Rotary:
    """The rotary embedding that `rope_parameters` describes."""
    facts = config["rope_parameters"]
    dim = int(heads(config)[2] * (facts.get("partial_rotary_factor") or 1))
    if dim < 2 or dim % 2 or dim > heads(config)[2]:
        raise ConfigError(
            f"rotary embeddings turn pairs of values, and {dim} of the {heads(config)[2]} of each head are to be turned"
        )
    return Rotary(dim, facts["rope_theta"], interleaved, scaling(config, facts, dim // 2))


def scaling(config: Config, facts: dict[str, Any], pairs: int) -> Scaling | None:
    original = facts.get("original_max_position_embeddings") or config["max_position_embeddings"]
    given = {key: value for key, value in facts.items() if value is not None}
    match facts["rope_type"]:
        case "linear":
            return Linear(facts["factor"])
        case "dynamic":
            return Dynamic(facts["factor"], config["max_position_embeddings"])
        case "llama3":
            return Llama3(facts["factor"], facts["low_freq_factor"], facts["high_freq_factor"], original)
        case "yarn":
            named = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
            return Yarn(facts["factor"], original, **{key: given[key] for key in named if key in given})
        case "longrope":
            longer = given.get("factor", config["max_position_embeddings"] / original)
            sets = tuple(facts["short_factor"]), tuple(facts["long_factor"])
            if {*map(len, sets)} != {pairs}:
                given_sizes = " and ".join(str(len(factors)) for factors in sets)
                raise ConfigError(f"longrope has {given_sizes} factors, short and long, and {pairs} pairs to turn")
            return LongRope(*sets, original, longer, given.get("attention_factor"))
    return None


def out_scale(config: Config) -> float:
    """By how much new matrices that write to the residual stream are smaller, as in `Transformer`: a layer has two."""
    return (2 * config["num_hidden_layers"]) ** -0.5


def attention(config: Config, **options: Any) -> Callable[..., Attention]:
    """Options as `Attention` takes them; sizes come from the config, and the rotation unless given."""
    count, kv_heads, head_dim = heads(config)
    options = {"rotary": rotary(config), **options} if "rotary" not in options else options
    if options.get("window") == 0:
        raise ConfigError("sliding_window = 0: a window holds at least 1 token, its own")
    sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "out_scale": out_scale(config)}
    return partial(Attention, config["hidden_size"], count, **{**sizes, **options})


def latent_attention(config: Config, *, interleaved: bool) -> Callable[..., Latent]:
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
        rotary=rotary(Config(config, head_dim=turned), interleaved=interleaved),
        bias=config["attention_bias"],
        out_scale=out_scale(config),
    )


def gated_mlp(config: Config, *, width: int | None = None, bias: bool = False) -> Callable[..., GatedMLP]:
    """`width` is that of the config unless given: an expert has its own."""
    sizes = config["hidden_size"], config["intermediate_size"] if width is None else width
    return partial(GatedMLP, *sizes, activation=activation(config), bias=bias, out_scale=out_scale(config))


def mlp(config: Config, *, bias: bool = True) -> Callable[..., MLP]:
    """`intermediate_size` is four times `hidden_size` where it is not given."""
    embed = config["hidden_size"]
    sizes = embed, config["intermediate_size"] or 4 * embed
    return partial(MLP, *sizes, activation=activation(config), bias=bias, out_scale=out_scale(config))


def mixture(
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
        check(experts, top, config.get("n_group", 1), config.get("topk_group", 1))
    except ValueError as error:
        raise ConfigError(f"{', '.join(f'{key} = {value}' for key, value in told.items())}: {error}") from None
    return partial(
        MixtureOfExperts,
        partial(router, embed, experts, top),
        gated_mlp(config, width=width) if expert is None else expert,
        experts,
        shared=None if shared is None else gated_mlp(config, width=shared),
        shared_gate=partial(Projection, embed, 1, in_=Dim("embed")) if gate else None,
    )


def biased_router(config: Config) -> Callable[..., BiasedRouter]:
    """DeepSeek-V3's: sigmoid scores, a bias that only chooses, groups of experts."""
    groups = {"groups": config["n_group"], "kept_groups": config["topk_group"]}
    scale = config["routed_scaling_factor"]
    return partial(BiasedRouter, renormalise=config["norm_topk_prob"], scale=scale, **groups)


def sparse_decoder(
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
    norm, dense = rms_norm(config), gated_mlp(config)

    def kind(value: tuple[bool, int | None]) -> Kind:
        is_sparse, window = value
        mixer = attention(config, window=window, **options)
        return layer(Block, norm=norm, mixer=mixer, ffn=experts if is_sparse else dense)

    seen = [None] * len(sparse) if windows is None else windows
    return decoder(config, kinds_of(zip(sparse, seen, strict=True), kind), norm, key=key)


def rms_norm(config: Config, **options: Any) -> Callable[[], RMSNorm]:
    return partial(RMSNorm, config["hidden_size"], epsilon=config["rms_norm_eps"], **options)


def head_norm(config: Config) -> Callable[[], RMSNorm]:
    """A norm over the width of one head."""
    return partial(RMSNorm, heads(config)[2], features=Dim("head_dim"), epsilon=config["rms_norm_eps"])


def layer_norm(config: Config, **options: Any) -> Callable[[], LayerNorm]:
    return partial(LayerNorm, config["hidden_size"], epsilon=config["layer_norm_eps"], **options)


def layer_types(config: Config, usual: Sequence[str]) -> list[str]:
    """The kind of each layer: as `layer_types` has them, or the `usual`. **Raises** `ConfigError` for another number of
    them than layers."""
    found = usual if config["layer_types"] is None else config["layer_types"]
    if not isinstance(found, list | tuple) or len(found) != config["num_hidden_layers"]:
        raise ConfigError(f"layer_types should name the kind of each of the {config['num_hidden_layers']} layers")
    return list(found)


def windows(types: Sequence[str], window: int | None) -> list[int | None]:
    """The window of each layer of these types. **Raises** `ConfigError` for an unknown type."""
    known = {"full_attention": None, "sliding_attention": window}
    for kind in types:
        if kind not in known:
            raise ConfigError(f"layer_types has {kind!r}, and layers here are {' or '.join(known)}")
        if kind == "sliding_attention" and window is None:
            raise ConfigError("layer_types has sliding_attention, and no sliding_window says how wide")
    return [known[kind] for kind in types]


def decoder(
    config: Config, kinds: Sequence[Kind], norm: Callable[[], Any], *, key: Key[Array, ""], **options: Any
) -> Decoder:
    """`assemble` with the sizes of the config."""
    sizes = {"vocab": config["vocab_size"], "embed": config["hidden_size"], "tied": config["tie_word_embeddings"]}
    return assemble(kinds=kinds, norm=norm, key=key, **sizes, **options)
