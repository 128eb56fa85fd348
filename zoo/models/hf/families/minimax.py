"""MiniMax-01 (arXiv:2501.08313): Lightning attention in some layers and softmax attention in the others, mixtures of
experts, and residuals that start after the norms, with factors. Slopes of the decays are read from the file; its
tables of decays follow from them, and are left aside."""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.layers import Lightning, SoftmaxRouter
from zoo.models.hf import grammar as hf

from . import llama, mixtral
from .minimax_layers import NormedResidualBlock


def _build_minimax(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    heads, _, head_dim = hf.read_head_sizes(config)
    default = hf.list_layer_types((n % 2 for n in range(config["num_hidden_layers"])), local="linear_attention")
    types = hf.read_layer_types(config, default)
    lightning = partial(
        Lightning,
        config["hidden_size"],
        heads,
        head_dim=head_dim,
        slopes=jnp.zeros(heads, jnp.float32),
        out_scale=hf.compute_out_scale(config),
    )
    attention = hf.make_attention_factory(config, window=config["sliding_window"])
    experts = hf.make_mixture_factory(config, SoftmaxRouter, config["num_experts"])
    mixers = hf.pick_mixers(types, {"linear_attention": lightning, "full_attention": attention})
    ffn_factors = (config["mlp_alpha_factor"], config["mlp_beta_factor"])
    blocks = {
        kind: partial(
            NormedResidualBlock,
            mixer_factors=(config[f"{word}_alpha_factor"], config[f"{word}_beta_factor"]),
            ffn_factors=ffn_factors,
        )
        for kind, word in (("linear_attention", "linear_attn"), ("full_attention", "full_attn"))
    }
    layers = [(mixer, experts) for mixer in mixers]
    norm = hf.make_rms_norm_factory(config)
    model = hf.build_config_decoder(config, layers, norm, block=[blocks[kind] for kind in types], key=key)
    return hf.set_by_layer(model, "lightning.slopes", lambda layer: _compute_slopes(heads, layer, len(types)))


def _compute_slopes(heads: int, layer: int, layers: int) -> Float[Array, "heads"]:
    """Return the slopes that MiniMax's class starts with: as `lightning_slopes`, with 1e-5 against a depth of 1."""
    rates = jnp.exp2(-8 * (jnp.arange(heads, dtype=jnp.float32) + 1) / heads)
    return rates * (1 - layer / (layers - 1 + 1e-5) + 1e-5)


def _map_lightning_names(config: hf.Config) -> hf.NameMap:
    parts = [f"projections.{part}" for part in ("query", "key", "value")]
    lightning = {
        "qkv_proj": hf.fused(*parts, groups=config["num_attention_heads"]),
        "slope_rate": hf.TensorMapping(("slopes",), trailing_ones=2),
        "norm": "readout.norm",
        "output_gate": "readout.gate",
        "out_proj": "readout.out",
    }
    return hf.prefixed("model.layers.*.self_attn", "layers.*.lightning", lightning)


def _map_minimax_names(config: hf.Config) -> hf.NameMap:
    return {**mixtral.map_mixtral_names(config), **_map_lightning_names(config)}


def _map_minimax_memory_names(config: hf.Config) -> hf.NameMap:
    return {**mixtral.map_mixtral_memory_names(config), **_map_lightning_names(config)}


MINIMAX = hf.Family(
    name="minimax",
    architecture="MiniMaxForCausalLM",
    build=_build_minimax,
    names=_map_minimax_names,
    defaults={
        **mixtral.MIXTRAL.declared,
        "layer_types": hf.optional_words(),
        **{
            f"{word}_{factor}_factor": 1.0
            for word in ("linear_attn", "full_attn", "mlp")
            for factor in ("alpha", "beta")
        },
    },
    aliases=mixtral.MIXTRAL.aliases,
    required_values={"hidden_act": ("silu",)},
    ignored_keys=mixtral.MIXTRAL.ignored_keys | {"block_size"},  # of the class's loop, and of its tables
    ignored_tensors=llama.LLAMA.ignored_tensors,
    other_modules=(r"\.self_attn\.(query|key|diagonal)_decay$",),
    memory_names=_map_minimax_memory_names,
)
