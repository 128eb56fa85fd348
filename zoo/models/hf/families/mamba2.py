"""Mamba-2 (Dao & Gu, arXiv:2405.21060) and Codestral Mamba: blocks of a mixer without a feed-forward layer."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import Mamba2, RMSNorm
from zoo.models.hf import grammar as hf


def _is_interval(value: Any) -> bool:
    """Return True for two increasing numbers not below 0. Infinity is written {"__float__": "Infinity"}."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    low, high = map(_read_infinity, value)
    return hf.is_number(low) and hf.is_number(high) and 0 <= low < high


def _read_infinity(x: Any) -> Any:
    if x == {"__float__": "Infinity"}:
        return float("inf")
    return x


TIME_STEP_LIMIT = hf.Default(
    [0.0, float("inf")], hf.ValueKind("two numbers not below 0, the second the larger", _is_interval)
)
"""Bounds of dt."""

MIXER_NAMES: hf.NameMap = {
    "in_proj": hf.fused("gate", "x", "B", "C", "dt"),
    "conv1d": hf.fused("x_convolution", "B_convolution", "C_convolution", conv1d_filters=True),
    "dt_bias": "dt_bias",
    "A_log": "A_log",
    "D": "D",
    "norm": "norm",
    "out_proj": "out",
}


def _build_mamba2(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    return build_mamba(config, _make_mamba2_factory(config), hidden_states_skip_embedding=True, key=key)


def _build_fla(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    options = {"norm": config["rmsnorm"], "norm_before_gate": config["norm_before_gate"]}
    mixer = _make_mamba2_factory(config, D_per_channel=config["D_has_hdim"], **options)
    return build_mamba(config, mixer, key=key)


def build_mamba(config: hf.Config, mixer: Callable[..., Any], *, key: Key[Array, ""], **options: Any) -> hf.Decoder:
    """Build a model of layers without a feed-forward layer, given the factory of their mixers."""
    layers = [(mixer, None)] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), key=key, **options)


def _make_mamba2_factory(config: hf.Config, **options: Any) -> Callable[..., Mamba2]:
    """Return a factory of `Mamba2` with the sizes of a config, and these options.

    **Raises** `ConfigError` unless heads times head dim is `expand * hidden_size`, and if groups do not divide heads.
    """
    groups = config["n_groups"]
    heads, head_dim = read_heads(config)
    if heads % groups:
        raise hf.ConfigError(f"num_heads = {heads} heads do not divide evenly over n_groups = {groups}")
    return partial(
        Mamba2,
        config["hidden_size"],
        heads,
        head_dim=head_dim,
        groups=groups,
        state_dim=config["state_size"],
        conv_width=config["conv_kernel"],
        bias=config["use_bias"],
        conv_bias=config["use_conv_bias"],
        epsilon=config["rms_norm_eps"],
        dt_limit=read_dt_limits(config),
        out_scale=config["num_hidden_layers"] ** -0.5,
        **options,
    )


def read_heads(config: hf.Config) -> tuple[int, int]:
    """Return the number of heads and their size. **Raises** `ConfigError` unless they fill `expand * hidden_size`."""
    inner = config["expand"] * config["hidden_size"]
    heads = config["num_heads"] or inner // config["head_dim"]
    head_dim = config["head_dim"] or inner // heads
    if inner != heads * head_dim:
        raise hf.ConfigError(f"expand * hidden_size = {inner} should be num_heads * head_dim = {heads} * {head_dim}")
    return heads, head_dim


def read_dt_limits(config: hf.Config) -> tuple[float, float]:
    """Return the bounds of dt. transformers writes infinity as {"__float__": "Infinity"}, which JSON lacks."""
    low, high = map(_read_infinity, config["time_step_limit"])
    return float(low), float(high)


def write_dt_limits(mixer: Mamba2) -> list[Any]:
    """Return the bounds of dt as transformers writes them."""
    low, high = mixer.dt_limit
    if high == float("inf"):
        return [low, {"__float__": "Infinity"}]
    return [low, high]


def _map_mamba2_names(config: hf.Config) -> hf.NameMap:
    return map_mamba_names("mamba2", MIXER_NAMES)


def map_mamba_names(path: str, mixer: hf.NameMap) -> hf.NameMap:
    """Return the name map of a model, given the names of its mixer `path`."""
    block = {"norm": "mixer_norm", **hf.prefixed("mixer", path, mixer)}
    shell = {"embeddings": "embedding", "norm_f": "norm", **hf.prefixed("layers.*", "layers.*", block)}
    return {**hf.prefixed("backbone", "", shell), "lm_head": "head"}


def _describe_mamba2(model: Any) -> dict[str, Any]:
    config, mixer = describe_mamba(model, Mamba2)
    convolution = mixer.x_convolution
    return config | {
        "n_groups": mixer.B.out_size // mixer.state_dim,
        "state_size": mixer.state_dim,
        "conv_kernel": convolution.width,
        "use_bias": hf.has_bias(mixer.out),
        "use_conv_bias": convolution.bias is not None,
        "time_step_limit": write_dt_limits(mixer),
        "rmsnorm": mixer.norm is not None,
        "norm_before_gate": mixer.norm is not None and mixer.norm.norm_before_gate,
        "D_has_hdim": mixer.skips.unit > 1,
    }


def describe_mamba(model: Any, mixer_type: type[Any]) -> tuple[dict[str, Any], Any]:
    """Return the config keys that Mamba-2 and Mamba-3 share, and the first mixer. **Raises** `ConfigError` for other
    classes of layers."""
    model, (block, *others) = hf.eval_shape_blocks(model)
    hf.check_type("block", block, hf.MixerBlock)
    hf.check_type("mixer", block.mixer, mixer_type)
    hf.check_type("mixer_norm", block.mixer_norm, RMSNorm)
    mixer = block.mixer
    vocab, embed = model.embedding.table_shape
    heads = mixer.dt.out_size
    return {
        "vocab_size": vocab,
        "hidden_size": embed,
        "num_hidden_layers": 1 + len(others),
        "num_heads": heads,
        "head_dim": mixer.head_dim,
        "expand": heads * mixer.head_dim // embed,
        "rms_norm_eps": block.mixer_norm.epsilon,
        "tie_word_embeddings": model.head is None,
    }, mixer


FLA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_heads": hf.optional_count(),
    "head_dim": 64,
    "state_size": 128,
    "expand": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
FLA_IGNORED_KEYS = frozenset(  # kernels, initialization, and a loss that adds 1e-4 of the largest logit to gradients
    """
    chunk_size dt_init_floor dt_max dt_min rescale_prenorm_residual residual_in_fp32 fuse_norm fuse_cross_entropy
    fuse_linear_cross_entropy use_l2warp
    """.split()
)
_FLA = hf.Family(
    name="mamba2",
    architecture="Mamba2ForCausalLM",
    build=_build_fla,
    names=_map_mamba2_names,
    defaults={
        **FLA_DEFAULTS,
        "n_groups": 1,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "rmsnorm": True,
        "norm_before_gate": False,
        "D_has_hdim": False,
        "time_step_limit": TIME_STEP_LIMIT,
    },
    aliases={"norm_eps": "rms_norm_eps", "dt_limit": "time_step_limit"},
    required_values={"hidden_act": ("silu", "swish")},
    ignored_keys=FLA_IGNORED_KEYS | {"A_init_range", "conv_init"},
    embedding="backbone.embeddings",
    describe=_describe_mamba2,
    fits=lambda config, names: not config.keys().isdisjoint(("norm_eps", "dt_limit", "rmsnorm", "D_has_hdim")),
)
"""Files of flash-linear-attention, which have keys of their own."""

MAMBA2 = hf.Family(
    name="mamba2",
    architecture="Mamba2ForCausalLM",
    build=_build_mamba2,
    names=_map_mamba2_names,
    defaults={
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_heads": 128,
        "head_dim": hf.optional_count(64),
        "n_groups": 8,
        "state_size": 128,
        "expand": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "rms_norm_eps": 1e-5,
        "time_step_limit": TIME_STEP_LIMIT,
        "tie_word_embeddings": False,
    },
    aliases={"layer_norm_epsilon": "rms_norm_eps"},
    required_values={
        "hidden_act": ("silu", "swish"),  # the kernels have no other
        "rms_norm": (True,),
        "rms_norm_eps": (None,),  # transformers does not read this key
    },
    ignored_keys=frozenset(
        {
            "chunk_size",  # implementation
            "max_position_embeddings",  # training length, which no layer reads
            *("time_step_rank", "time_step_min", "time_step_max", "time_step_floor"),  # initialization
            "rescale_prenorm_residual",  # initialization
            "residual_in_fp32",  # our residuals have the activation dtype; equal in float32
            "norm_before_gate",  # in some files, but transformers does not read it: the gate comes first
        }
    ),
    embedding="backbone.embeddings",
    describe=_describe_mamba2,
    variants=(_FLA,),
)
