"""BLOOM (BigScience, arXiv:2211.05100): GPT-2's layers with linear biases of attention (ALiBi), and a norm after the
embedding; a QKV projection that is fused per head."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import mpt
from .minimax_layers import NormedResidualBlock


def _build_bloom(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    config = hf.Config(config, hidden_act="gelu_fast", intermediate_size=None)
    mixer = mpt.make_alibi_factory(config, bias=True, out_bias=True)
    layers = [(mixer, hf.make_mlp_factory(config))] * config["num_hidden_layers"]
    norm = hf.make_layer_norm_factory(config)
    block = NormedResidualBlock if config["apply_residual_connection_post_layernorm"] else hf.Block
    return hf.build_config_decoder(config, layers, norm, embedding_norm=norm, block=block, key=key)


def _map_bloom_names(config: hf.Config) -> hf.NameMap:
    per_head = hf.fused("query", "key", "value", groups=config["num_attention_heads"])
    block = {
        "input_layernorm": "mixer_norm",
        "post_attention_layernorm": "ffn_norm",
        **hf.prefixed("self_attention", "alibi_attention", {"query_key_value": per_head, "dense": "out"}),
        **hf.prefixed("mlp", "mlp", {"dense_h_to_4h": "up", "dense_4h_to_h": "down"}),
    }
    shell = {"word_embeddings": "embedding", "word_embeddings_layernorm": "embedding_norm", "ln_f": "norm"}
    return {**hf.prefixed("transformer", "", {**shell, **hf.prefixed("h.*", "layers.*", block)}), "lm_head": "head"}


BLOOM = hf.Family(
    name="bloom",
    architecture="BloomForCausalLM",
    build=_build_bloom,
    names=_map_bloom_names,
    defaults={
        "vocab_size": 250880,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "apply_residual_connection_post_layernorm": False,
    },
    aliases={
        "n_embed": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    required_values={
        "n_inner": (None,),
        "layer_norm_eps": (None,),  # transformers does not read this key
    },
    # keys of its training code; `slow_but_exact` sums in another order
    ignored_keys=frozenset(
        {
            *("slow_but_exact", "offset_alibi", "masked_softmax_fusion", "attention_softmax_in_fp32"),
            *("bias_dropout_fusion", "skip_bias_add", "skip_bias_add_qkv"),
        }
    ),
    embedding="transformer.word_embeddings",
)
