"""OPT (Zhang et al., arXiv:2205.01068): GPT-2's layers with ReLU, and learned positions after two unused rows. OPT-350m
has norms after the sums, and an embedding of another size."""

from functools import partial

import jax
from jaxtyping import Array, Key

from zoo.layers import IdentityNorm, LayerNorm
from zoo.models.hf import grammar as hf

from .opt_layers import ProjectedNorm


def _build_opt(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    embed = config["hidden_size"]
    bias = config["enable_bias"]
    affine = config["layer_norm_elementwise_affine"]
    mixer = hf.make_attention_factory(config, rotary=None, bias=bias, out_bias=bias)
    layers = [(mixer, hf.make_mlp_factory(config, bias=bias))] * config["num_hidden_layers"]
    norm = partial(LayerNorm, embed, scaled=affine, bias=affine)
    final_norm = norm if _has_final_norm(config) else IdentityNorm
    if _is_projected(config):
        sizes = (embed, config["word_embed_proj_dim"])
        final_norm = partial(ProjectedNorm, final_norm(), *sizes, key=jax.random.fold_in(key, 1))
    options = {
        "block": hf.Block if config["do_layer_norm_before"] else hf.AddNormBlock,
        "final_norm": final_norm,
        "embedding_size": config["word_embed_proj_dim"],
        "positions": config["max_position_embeddings"],
        "position_offset": 2,
    }
    return hf.build_config_decoder(config, layers, norm, key=key, **options)


def _has_final_norm(config: hf.Config) -> bool:
    return config["do_layer_norm_before"] and not config["_remove_final_layer_norm"]


def _is_projected(config: hf.Config) -> bool:
    return config["word_embed_proj_dim"] not in (None, config["hidden_size"])


ATTENTION_NAMES: hf.NameMap = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
BLOCK_NAMES: hf.NameMap = {
    "self_attn_layer_norm": "mixer_norm",
    "final_layer_norm": "ffn_norm",
    **hf.prefixed("self_attn", "attention", ATTENTION_NAMES),
    "fc1": "mlp.up",
    "fc2": "mlp.down",
}
"""A layer in the names of fairseq, from which OPT, BioGPT and XGLM come."""


def _map_opt_names(config: hf.Config) -> hf.NameMap:
    shell = {
        "embed_tokens": "embedding",
        "project_in": "embedding_projection",
        "embed_positions": "position_embedding",
        "final_layer_norm": "norm.norm" if _is_projected(config) else "norm",
        "project_out": "norm.linear",
    }
    return {
        **hf.prefixed("model.decoder", "", {**shell, **hf.prefixed("layers.*", "layers.*", BLOCK_NAMES)}),
        "lm_head": "head",
    }


OPT = hf.Family(
    name="opt",
    architecture="OPTForCausalLM",
    build=_build_opt,
    names=_map_opt_names,
    defaults={
        "vocab_size": 50272,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_act": "relu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "word_embed_proj_dim": hf.optional_count(),
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
    },
    aliases={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
    required_values=dict.fromkeys(("hidden_act", "intermediate_size"), (None,)),  # transformers reads neither
    ignored_keys=frozenset({"activation_dropout", "dropout", "layerdrop", "init_std"}),
    embedding="model.decoder.embed_tokens",
)
