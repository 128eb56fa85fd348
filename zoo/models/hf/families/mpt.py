"""MPT (MosaicML, "MPT-7B", 2023): GPT-2's layers with linear biases of attention (ALiBi), and no biases otherwise."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import AlibiAttention
from zoo.models.hf import grammar as hf


def _build_mpt(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    attention = hf.read_config(_ATTENTION, config["attn_config"], ignore=None)
    config = hf.Config(config, hidden_act="gelu", intermediate_size=None)
    mixer = make_alibi_factory(config, clip=attention["clip_qkv"], scale=attention["softmax_scale"])
    layers = [(mixer, hf.make_mlp_factory(config, bias=False))] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, hf.make_layer_norm_factory(config, bias=False), key=key)


def make_alibi_factory(config: hf.Config, **options: Any) -> Callable[..., AlibiAttention]:
    """Return a factory of attention with linear biases. **Raises** `ConfigError` if heads do not divide
    hidden_size."""
    heads, _, head_dim = hf.read_head_sizes(config)
    sizes = {"head_dim": head_dim, "out_scale": hf.compute_out_scale(config)}
    return partial(AlibiAttention, config["hidden_size"], heads, **sizes, **options)


def _map_mpt_names(config: hf.Config) -> hf.NameMap:
    block = {
        "norm_1": "mixer_norm",
        "norm_2": "ffn_norm",
        **hf.prefixed("attn", "alibi_attention", {"Wqkv": hf.fused("query", "key", "value"), "out_proj": "out"}),
        **hf.prefixed("ffn", "mlp", {"up_proj": "up", "down_proj": "down"}),
    }
    shell = {"wte": "embedding", "norm_f": "norm", **hf.prefixed("blocks.*", "layers.*", block)}
    return {**hf.prefixed("transformer", "", shell), "lm_head": "head"}


_ATTENTION = hf.Family(
    name="mpt's attn_config",
    architecture="",
    build=_build_mpt,
    names=_map_mpt_names,
    defaults={"clip_qkv": hf.optional_number(), "softmax_scale": hf.optional_number()},
    required_values={
        "attn_type": ("multihead_attention",),
        "alibi": (True,),
        "alibi_bias_max": (8,),
        **dict.fromkeys(("prefix_lm", "qk_ln", "attn_uses_sequence_id"), (False,)),
    },
    ignored_keys=frozenset({"attn_impl"}),
)
"""The table `attn_config`, read as a config of its own."""

MPT = hf.Family(
    name="mpt",
    architecture="MptForCausalLM",
    build=_build_mpt,
    names=_map_mpt_names,
    defaults={
        "vocab_size": 50368,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attn_config": hf.Default({}, hf.ValueKind("a table", lambda value: isinstance(value, Mapping))),
    },
    aliases={
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    required_values={
        "expansion_ratio": (4,),
        "no_bias": (True,),
        "logit_scale": (None,),
        "layer_norm_eps": (None,),  # transformers does not read this key
    },
    # the length of ALiBi is not limited here; the other keys are for training
    ignored_keys=frozenset(
        {"max_seq_len", "learned_pos_emb", "embedding_fraction", "norm_type", "init_device", "emb_pdrop", "verbose"}
    ),
    embedding="transformer.wte",
)
