"""Falcon (Almazrouei et al., arXiv:2311.16867): attention and feed-forward in parallel, with RoPE and shared keys; in
Falcon-RW (Penedo et al., arXiv:2306.01116) one after the other, with linear biases of attention (ALiBi)."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama, mpt


def _build_falcon(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    ffn = hf.make_mlp_factory(config, bias=config["bias"])
    block = _choose_block(config)
    layers = [(_make_mixer(config), ffn)] * config["num_hidden_layers"]
    norm = hf.make_layer_norm_factory(config)
    return hf.build_config_decoder(config, layers, norm, block=block, key=key)


def _count_kv_heads(config: hf.Config) -> int:
    """Return the number of keys that a token has."""
    if config["new_decoder_architecture"]:
        return config["num_key_value_heads"] or config["num_attention_heads"]
    if config["multi_query"]:
        return 1
    return config["num_attention_heads"]


def _make_mixer(config: hf.Config) -> hf.MixerFactory:
    """Return a factory of attention. **Raises** `ConfigError` for ALiBi with shared keys."""
    bias = {"bias": config["bias"], "out_bias": config["bias"]}
    kv_heads = _count_kv_heads(config)
    if not config["alibi"]:
        return hf.make_attention_factory(hf.Config(config, num_key_value_heads=kv_heads), **bias)
    if kv_heads != config["num_attention_heads"]:
        raise hf.ConfigError(f"alibi = True with {kv_heads} keys a token: only a key for each head is computed here")
    return mpt.make_alibi_factory(config, rounded=True, **bias)


def _choose_block(config: hf.Config) -> Callable[..., Any]:
    """Return the residual wiring. **Raises** `ConfigError` for wiring that transformers does not run."""
    norms, is_new, is_parallel = (
        config[key] for key in ("num_ln_in_parallel_attn", "new_decoder_architecture", "parallel_attn")
    )
    if is_new and not is_parallel:
        raise hf.ConfigError("new_decoder_architecture with parallel_attn = False: attention is in parallel there")
    if norms not in (None, 1, 2) or (norms == 2 and not is_new):
        raise hf.ConfigError(f"num_ln_in_parallel_attn = {norms}: 1, or 2 with new_decoder_architecture")
    if is_new and norms != 1:
        return hf.ParallelBlock
    return hf.make_one_norm_block if is_parallel else hf.Block


def _map_falcon_names(config: hf.Config) -> hf.NameMap:
    is_two_norms = config["new_decoder_architecture"] and config["num_ln_in_parallel_attn"] != 1
    if is_two_norms:
        norms = {"ln_attn": "mixer_norm", "ln_mlp": "ffn_norm"}
    else:
        norms = llama.PRE_NORM_NAMES
    by_key = hf.fused("query", "key", "value", groups=_count_kv_heads(config))
    attention = "alibi_attention" if config["alibi"] else "attention"
    block = {
        **norms,
        **hf.prefixed("self_attention", attention, {"query_key_value": by_key, "dense": "out"}),
        **hf.prefixed("mlp", "mlp", {"dense_h_to_4h": "up", "dense_4h_to_h": "down"}),
    }
    shell = {"word_embeddings": "embedding", "ln_f": "norm", **hf.prefixed("h.*", "layers.*", block)}
    return {**hf.prefixed("transformer", "", shell), "lm_head": "head"}


FALCON = hf.Family(
    name="falcon",
    architecture="FalconForCausalLM",
    build=_build_falcon,
    names=_map_falcon_names,
    defaults={
        "vocab_size": 65024,
        "hidden_size": 4544,
        "intermediate_size": hf.optional_count(),
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "num_key_value_heads": hf.optional_count(),
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 10000.0},
        "num_ln_in_parallel_attn": hf.optional_count(),
        "alibi": False,
        "new_decoder_architecture": False,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
    },
    aliases={
        "n_embed": "hidden_size",
        "ffn_hidden_size": "intermediate_size",
        "num_kv_heads": "num_key_value_heads",
        "activation": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    required_values={
        "apply_residual_connection_post_layernorm": (False,),
        # transformers does not read these keys
        **dict.fromkeys(("intermediate_size", "num_key_value_heads", "hidden_act", "layer_norm_eps"), (None,)),
    },
    ignored_tensors=llama.LLAMA.ignored_tensors,
    embedding="transformer.word_embeddings",
)
