"""LLaDA (Nie et al., arXiv:2502.09992): a diffusion language model with LLaMA's layers, attention in both directions
and OLMo's names.

The logits at a place are of the token at this place.
"""

from typing import Any

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama

_LAYERS = {"block_type": "llama", "layer_norm_type": "rms", "rope": True}
"""Required keys. Without one, the class has GPT-2's layers."""


def _build_llada(config: hf.Config, *, key: Key[Array, ""]) -> hf.Encoder:
    """**Raises** `ConfigError` for layers other than LLaMA's."""
    for name, value in _LAYERS.items():
        if config[name] != value:
            raise hf.ConfigError(f"{name} = {config[name]!r}, and layers are read with {value!r} only")
    sizes = {
        "vocab_size": config["embedding_size"] or config["vocab_size"],
        "intermediate_size": config["intermediate_size"] or config["mlp_ratio"] * config["hidden_size"],
    }
    return build_denoiser(hf.Config(config, **sizes), bias=config["include_qkv_bias"], key=key)


def build_denoiser(config: hf.Config, *, bias: bool, key: Key[Array, ""]) -> hf.Encoder:
    """Build LLaMA's layers without a causal mask, with a masked-LM head. `bias`: of queries, keys and values."""
    norm = hf.make_rms_norm_factory(config)
    mixer = hf.make_bidirectional_attention_factory(config, rotary=hf.build_rotary(config), bias=bias)
    layers = [(mixer, hf.make_gated_mlp_factory(config))] * config["num_hidden_layers"]
    heads = {"MaskedLM": hf.make_masked_lm_head_factory(config, None, bias=False)}
    options: dict[str, Any] = {"norm": norm, "final_norm": norm, "block": hf.Block}
    return hf.build_config_encoder(hf.Config(config, architectures=None), layers, "", heads, key=key, **options)


def _map_llada_names(config: hf.Config) -> hf.NameMap:
    attention = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "attn_out": "out"}
    block = {
        "attn_norm": "mixer_norm",
        "ff_norm": "ffn_norm",
        **hf.prefixed("", "bidirectional_attention", attention),
        **hf.prefixed("", "gated_mlp", {"ff_proj": "gate", "up_proj": "up", "ff_out": "down"}),
    }
    shell = {"wte": "embedding", "ln_f": "norm", "ff_out": "head.decoder"}
    return hf.prefixed("model.transformer", "", {**shell, **hf.prefixed("blocks.*", "layers.*", block)})


LLADA = hf.Family(
    name="llada",
    architecture="LLaDAModelLM",
    build=_build_llada,
    names=_map_llada_names,
    defaults={
        "vocab_size": 50257,
        "embedding_size": hf.optional_count(50304),
        "hidden_size": 768,
        "intermediate_size": hf.optional_count(),
        "mlp_ratio": 4,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": hf.optional_count(),
        "max_position_embeddings": 1024,
        "hidden_act": "swiglu",
        "block_type": "sequential",
        "layer_norm_type": "default",
        "rms_norm_eps": 1e-5,
        "rope": False,
        "rope_parameters": {"rope_theta": 10000.0},
        "include_qkv_bias": False,
        "tie_word_embeddings": True,
    },
    aliases={
        "d_model": "hidden_size",
        "mlp_hidden_size": "intermediate_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "max_sequence_length": "max_position_embeddings",
        "activation_type": "hidden_act",
        "weight_tying": "tie_word_embeddings",
    },
    required_values={
        "architectures": (None, ["LLaDAModelLM"]),
        "block_group_size": (1,),
        "multi_query_attention": (None,),
        "include_bias": (False,),
        "bias_for_layer_norm": (None, False),
        "layer_norm_with_affine": (True,),
        **dict.fromkeys(("alibi", "attention_layer_norm", "input_emb_norm", "scale_logits"), (False,)),
    },
    ignored_keys=frozenset(
        {"alibi_bias_max", "attention_layer_norm_with_affine", "embedding_dropout", "flash_attention"}
        | {"init_cutoff_factor", "init_device", "init_fn", "init_std", "precision", "residual_dropout"}
        | {"rope_full_precision"}
    ),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    head="model.transformer.ff_out",
    embedding="model.transformer.wte",
)
