"""SantaCoder and StarCoder (Ben Allal et al., arXiv:2301.03988; Li et al., arXiv:2305.06161): GPT-2's layers with one
key and value head for all query heads."""

import dataclasses

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import gpt2


def _build_gpt_bigcode(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    if config["multi_query"]:
        kv_heads = 1
    else:
        kv_heads = config["num_attention_heads"]
    scale = None if config["scale_attn_weights"] else 1.0
    options = {"bias": True, "out_bias": True, "kv_heads": kv_heads, "scale": scale}
    mixer = hf.make_attention_factory(config, rotary=None, **options)
    layers = [(mixer, hf.make_mlp_factory(config))] * config["num_hidden_layers"]
    positions = config["max_position_embeddings"]
    return hf.build_config_decoder(config, layers, hf.make_layer_norm_factory(config), positions=positions, key=key)


def _map_gpt_bigcode_names(config: hf.Config) -> hf.NameMap:
    """Return the name map: with one key head the projections follow each other, and else they do in each head."""
    groups = 1 if config["multi_query"] else config["num_attention_heads"]
    attention = {"c_attn": hf.fused("query", "key", "value", groups=groups), "c_proj": "out"}
    block = {
        "ln_1": "mixer_norm",
        "ln_2": "ffn_norm",
        **hf.prefixed("attn", "attention", attention),
        **hf.prefixed("mlp", "mlp", {"c_fc": "up", "c_proj": "down"}),
    }
    shell = {"wte": "embedding", "wpe": "position_embedding", "ln_f": "norm", **hf.prefixed("h.*", "layers.*", block)}
    return {**hf.prefixed("transformer", "", shell), "lm_head": "head"}


GPT_BIGCODE = dataclasses.replace(
    gpt2.GPT2,
    name="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    build=_build_gpt_bigcode,
    names=_map_gpt_bigcode_names,
    defaults={
        **hf.omit(gpt2.GPT2.declared, "scale_attn_by_inverse_layer_idx"),
        "hidden_act": "gelu_pytorch_tanh",
        "multi_query": True,
    },
    # scores are float32 here, whatever is said; the others are of its first serving code
    ignored_keys=gpt2.GPT2.ignored_keys
    | {
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "num_key_value_heads", "inference_runner"),
        *("max_batch_size", "max_sequence_length", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input"),
    },
)
