"""Mamba-2 (Dao & Gu, arXiv:2405.21060) and Codestral Mamba: layers that are a mixer alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import Mamba2, RMSNorm
from zoo.models.blocks import MixerBlock
from zoo.models.decoder import Decoder
from zoo.models.hf.builders import build_config_decoder, make_rms_norm_factory
from zoo.models.hf.config import ConfigError
from zoo.models.hf.spec import Config, Family, NameMap, fused, prefixed

from ..describe import check_type, eval_shape_blocks

_MIXER_NAMES: NameMap = {
    "in_proj": fused("gate", "x", "B", "C", "dt"),
    "conv1d": fused("x_convolution", "B_convolution", "C_convolution", conv1d_filters=True),
    "dt_bias": "dt_bias",
    "A_log": "A_log",
    "D": "D",
    "norm": "norm",
    "out_proj": "out",
}


def _build_mamba2(config: Config, *, key: Key[Array, ""]) -> Decoder:
    norm = make_rms_norm_factory(config)
    layers = [(_make_mamba2_factory(config), None)] * config["num_hidden_layers"]
    return build_config_decoder(config, layers, norm, hidden_states_skip_embedding=True, key=key)


def _make_mamba2_factory(config: Config) -> Callable[..., Mamba2]:
    """**Raises** `ConfigError` where heads are not as wide together as `expand` says, or do not share out."""
    embed, heads, groups = (config[key] for key in ("hidden_size", "num_heads", "n_groups"))
    inner = config["expand"] * embed
    head_dim = config["head_dim"] or inner // heads
    if inner != heads * head_dim:
        raise ConfigError(f"expand * hidden_size = {inner} should be num_heads * head_dim = {heads} * {head_dim}")
    if heads % groups:
        raise ConfigError(f"num_heads = {heads} heads do not share out over n_groups = {groups}")
    return partial(
        Mamba2,
        embed,
        heads,
        head_dim=head_dim,
        groups=groups,
        state_dim=config["state_size"],
        conv_width=config["conv_kernel"],
        bias=config["use_bias"],
        conv_bias=config["use_conv_bias"],
        epsilon=config["rms_norm_eps"],
        dt_limit=_read_dt_limits(config),
        out_scale=config["num_hidden_layers"] ** -0.5,
    )


def _read_dt_limits(config: Config) -> tuple[float, float]:
    """The bounds of steps. transformers writes infinity as a word, since JSON has no number for it."""
    low, high = (float(x["__float__"]) if isinstance(x, dict) else float(x) for x in config["time_step_limit"])
    return low, high


def _map_mamba2_names(config: Config) -> NameMap:
    block = {"norm": "mixer_norm", **prefixed("mixer", "mamba2", _MIXER_NAMES)}
    shell = {"embeddings": "embedding", "norm_f": "norm", **prefixed("layers.*", "layers.*", block)}
    return {**prefixed("backbone", "", shell), "lm_head": "head"}


def _describe_mamba2(model: Any) -> dict[str, Any]:
    """**Raises** `ConfigError` for layers of another kind."""
    model, (block, *others) = eval_shape_blocks(model)
    check_type("block", block, MixerBlock)
    check_type("mixer", block.mixer, Mamba2)
    check_type("mixer_norm", block.mixer_norm, RMSNorm)
    mixer, (vocab, embed) = block.mixer, model.embedding.table_shape
    heads, convolution = mixer.dt.out_size, mixer.x_convolution
    low, high = mixer.dt_limit
    return {
        "vocab_size": vocab,
        "hidden_size": embed,
        "num_hidden_layers": 1 + len(others),
        "num_heads": heads,
        "head_dim": mixer.head_dim,
        "n_groups": mixer.B.out_size // mixer.state_dim,
        "state_size": mixer.state_dim,
        "expand": heads * mixer.head_dim // embed,
        "conv_kernel": convolution.width,
        "use_bias": getattr(mixer.out, "bias", None) is not None,
        "use_conv_bias": convolution.bias is not None,
        "rms_norm_eps": block.mixer_norm.epsilon,
        "time_step_limit": [low, {"__float__": "Infinity"} if high == float("inf") else high],
        "tie_word_embeddings": model.head is None,
    }


MAMBA2 = Family(
    name="mamba2",
    architecture="Mamba2ForCausalLM",
    build=_build_mamba2,
    names=_map_mamba2_names,
    defaults={
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_heads": 128,
        "head_dim": 64,
        "n_groups": 8,
        "state_size": 128,
        "expand": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "rms_norm_eps": 1e-5,
        "time_step_limit": [0.0, float("inf")],
        "tie_word_embeddings": False,
    },
    aliases={"layer_norm_epsilon": "rms_norm_eps"},
    required_values={
        "hidden_act": ("silu", "swish"),  # the kernels know no other
        "rms_norm": (True,),
        "rms_norm_eps": (None,),  # nobody reads this word
    },
    ignored_keys=frozenset(
        {
            "chunk_size",  # how, not what
            "max_position_embeddings",  # what a recipe says it was trained on: no layer asks
            *("time_step_rank", "time_step_min", "time_step_max", "time_step_floor"),  # of new weights
            "rescale_prenorm_residual",  # of new weights
            "residual_in_fp32",  # the stream has the dtype of the activations, and in float32 that is the same
            "norm_before_gate",  # some files say so, and nobody reads it: the gate comes first
        }
    ),
    embedding="backbone.embeddings",
    describe=_describe_mamba2,
)
