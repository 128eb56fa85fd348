"""Mamba (Gu & Dao, arXiv:2312.00752): blocks of a mixer without a feed-forward layer."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import Mamba, RMSNorm
from zoo.models.hf import grammar as hf

COUNT_OR_AUTO = hf.ValueKind("a whole number above 0, or auto", lambda value: value == "auto" or hf.COUNT.fits(value))


MIXER_NAMES: hf.NameMap = {
    "in_proj": hf.fused("x", "gate"),
    "conv1d": hf.fused("convolution", conv1d_filters=True),
    "x_proj": hf.fused("dt_down", "B", "C"),
    "dt_proj.weight": "dt_up.weight",
    "dt_proj.bias": "dt_bias",
    "A_log": "A_log",
    "D": "D",
    "out_proj": "out",
}


def _build_mamba(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    return build_mamba_decoder(config, make_mamba_factory(config), key=key)


def build_mamba_decoder(config: hf.Config, mixer: Callable[..., Mamba], *, key: Key[Array, ""]) -> hf.Decoder:
    """Build a decoder of mixer-only layers."""
    norm = hf.make_rms_norm_factory(config)
    layers = [(mixer, None)] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, norm, hidden_states_skip_embedding=True, key=key)


def make_mamba_factory(config: hf.Config, **options: Any) -> Callable[..., Mamba]:
    """Return a factory of `Mamba` with the sizes of a config."""
    embed = config["hidden_size"]
    rank = config["time_step_rank"]
    if rank == "auto":
        rank = None
    return partial(
        Mamba,
        embed,
        inner=config["intermediate_size"] or config["expand"] * embed,
        state_dim=config["state_size"],
        rank=rank,
        conv_width=config["conv_kernel"],
        bias=config["use_bias"],
        conv_bias=config["use_conv_bias"],
        out_scale=config["num_hidden_layers"] ** -0.5,
        **options,
    )


def map_mamba_names(config: hf.Config) -> hf.NameMap:
    """Return the name map of Mamba and Falcon Mamba."""
    block = {"norm": "mixer_norm", **hf.prefixed("mixer", "mamba", MIXER_NAMES)}
    shell = {"embeddings": "embedding", "norm_f": "norm", **hf.prefixed("layers.*", "layers.*", block)}
    return {**hf.prefixed("backbone", "", shell), "lm_head": "head"}


def _describe_mamba(model: Any) -> dict[str, Any]:
    """Return the config of a Mamba model. **Raises** `ConfigError` for other classes of layers."""
    model, (block, *others) = hf.eval_shape_blocks(model)
    hf.check_type("block", block, hf.MixerBlock)
    hf.check_type("mixer", block.mixer, Mamba)
    hf.check_type("mixer_norm", block.mixer_norm, RMSNorm)
    mixer = block.mixer
    vocab, embed = model.embedding.table_shape
    inner, state_dim = mixer.A_log.shape
    return {
        "vocab_size": vocab,
        "hidden_size": embed,
        "intermediate_size": inner,
        "num_hidden_layers": 1 + len(others),
        "state_size": state_dim,
        "expand": max(inner // embed, 1),
        "conv_kernel": mixer.convolution.width,
        "time_step_rank": mixer.dt_down.out_size,
        "use_bias": hf.has_bias(mixer.out),
        "use_conv_bias": mixer.convolution.bias is not None,
        "rms_norm_eps": block.mixer_norm.epsilon,
        "tie_word_embeddings": model.head is None,
    }


DEFAULTS: dict[str, Any] = {
    "vocab_size": 50280,
    "hidden_size": 768,
    "intermediate_size": hf.optional_count(),
    "num_hidden_layers": 32,
    "state_size": 16,
    "expand": 2,
    "conv_kernel": 4,
    "time_step_rank": hf.Default("auto", COUNT_OR_AUTO),
    "use_bias": False,
    "use_conv_bias": True,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
REQUIRED_VALUES: dict[str, tuple] = {
    "hidden_act": ("silu", "swish"),  # the kernels have no other
    "rms_norm": (True,),
    "rms_norm_eps": (None,),  # transformers does not read this key
}
IGNORED_KEYS = frozenset(
    {
        # initialization
        *("time_step_min", "time_step_max", "time_step_floor", "time_step_scale", "time_step_init_scheme"),
        "rescale_prenorm_residual",
        "max_position_embeddings",  # training length, which no layer reads
        *("use_mambapy", "use_associative_scan", "fused_add_norm"),  # implementation
        "residual_in_fp32",  # our residuals have the activation dtype; equal in float32
        *("d_inner", "d_model", "n_layer", "ssm_cfg", "pad_vocab_size_multiple"),  # of the original code, not read
    }
)
"""Ignored keys of Mamba and Falcon Mamba."""

MAMBA = hf.Family(
    name="mamba",
    architecture="MambaForCausalLM",
    build=_build_mamba,
    names=map_mamba_names,
    defaults=DEFAULTS,
    aliases={"layer_norm_epsilon": "rms_norm_eps"},
    required_values=REQUIRED_VALUES,
    ignored_keys=IGNORED_KEYS,
    embedding="backbone.embeddings",
    describe=_describe_mamba,
)
