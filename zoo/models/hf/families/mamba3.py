"""Mamba-3 (Lahoti et al., arXiv:2603.15569) in the files of flash-linear-attention, with decays of its own: A is
-softplus(W_A u), not the function of the authors' code."""

from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Key

from zoo.layers import Mamba3, RMSNorm
from zoo.models.hf import grammar as hf

_MIXER_NAMES: hf.NameMap = {
    "in_proj": hf.fused("gate", "x", "B", "C", "dt", "A", "trapezoid", "angle"),
    **{name: name for name in ("dt_bias", "B_bias", "C_bias", "B_norm", "C_norm", "D", "norm")},
    "out_proj": "out",
}


def _build_mamba3(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    embed, head_dim = config["hidden_size"], config["head_dim"]
    inner = config["expand"] * embed
    if inner % head_dim or config["num_heads"] not in (None, inner // head_dim):
        raise hf.ConfigError(
            f"expand * hidden_size = {inner} should be num_heads * head_dim = {config['num_heads']} * {head_dim}"
        )
    mixer = partial(
        Mamba3,
        embed,
        inner // head_dim,
        head_dim=head_dim,
        state_dim=config["state_size"],
        angles=int(config["state_size"] * config["rope_fraction"]) // 2,
        norm=config["is_outproj_norm"],
        epsilon=config["rms_norm_eps"],
        decay_rate=jax.nn.softplus,
        min_decay_rate=config["A_floor"],
        out_scale=config["num_hidden_layers"] ** -0.5,
    )
    layers = [(mixer, None)] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), key=key)


def _map_mamba3_names(config: hf.Config) -> hf.NameMap:
    block = {"norm": "mixer_norm", **hf.prefixed("mixer", "mamba3", _MIXER_NAMES)}
    shell = {"embeddings": "embedding", "norm_f": "norm", **hf.prefixed("layers.*", "layers.*", block)}
    return {**hf.prefixed("backbone", "", shell), "lm_head": "head"}


def _describe_mamba3(model: Any) -> dict[str, Any]:
    """Return the config of a Mamba-3 model. **Raises** `ConfigError` for other classes of layers, and for decays of
    another function of W_A u."""
    model, (block, *others) = hf.eval_shape_blocks(model)
    hf.check_type("mixer", getattr(block, "mixer", block), Mamba3)
    hf.check_type("block", block, hf.MixerBlock)
    hf.check_type("mixer_norm", block.mixer_norm, RMSNorm)
    mixer = block.mixer
    if mixer.decay_rate is not jax.nn.softplus:
        raise hf.ConfigError("its decay_rate is not jax.nn.softplus, and the authors' function has no files")
    vocab, embed = model.embedding.table_shape
    heads, _, state_dim = mixer.B_bias.shape
    return {
        "vocab_size": vocab,
        "hidden_size": embed,
        "num_hidden_layers": 1 + len(others),
        "num_heads": heads,
        "head_dim": mixer.head_dim,
        "state_size": state_dim,
        "expand": heads * mixer.head_dim // embed,
        "rope_fraction": 2 * mixer.angle.out_size / state_dim,
        "A_floor": mixer.min_decay_rate,
        "is_outproj_norm": mixer.norm is not None,
        "rms_norm_eps": block.mixer_norm.epsilon,
        "tie_word_embeddings": model.head is None,
    }


MAMBA3 = hf.Family(
    name="mamba3",
    architecture="Mamba3ForCausalLM",
    build=_build_mamba3,
    names=_map_mamba3_names,
    defaults={
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_heads": hf.optional_count(),
        "head_dim": 64,
        "state_size": 128,
        "expand": 2,
        "rope_fraction": hf.Default(
            0.5, hf.ValueKind("0.5 or 1", lambda value: hf.is_number(value) and value in (0.5, 1))
        ),
        "A_floor": hf.Default(1e-4, hf.POSITIVE_NUMBER),
        "is_outproj_norm": False,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    aliases={"norm_eps": "rms_norm_eps"},
    required_values={"hidden_act": ("silu", "swish"), "is_mimo": (False,), "n_groups": (1,), "use_bias": (False,)},
    ignored_keys=frozenset(  # kernels, initialization and a term of the loss
        """
        chunk_size mimo_rank dt_init_floor dt_max dt_min rescale_prenorm_residual residual_in_fp32 fuse_norm
        fuse_cross_entropy fuse_linear_cross_entropy use_l2warp
        """.split()
    ),
    embedding="backbone.embeddings",
    describe=_describe_mamba3,
)
