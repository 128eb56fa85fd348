"""Nomic Embed (Nussbaum et al., arXiv:2402.01613): BERT's layers with RoPE and gated MLPs, without biases."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import IdentityNorm
from zoo.models.hf import grammar as hf

from . import bert


def _build_nomic_bert(config: hf.Config, *, key: Key[Array, ""]) -> hf.Encoder:
    size = config["hidden_size"]
    norm = hf.make_layer_norm_factory(config)
    transform = partial(hf.DenseTransform, size, activation=hf.find_activation(config), norm=norm)
    mixer = hf.make_bidirectional_attention_factory(config, rotary=hf.build_rotary(config))
    return hf.build_config_encoder(
        config,
        [(mixer, hf.make_gated_mlp_factory(config))] * config["num_hidden_layers"],
        "NomicBert",
        hf.make_bert_heads(config, transform),
        norm=norm,
        embedding_norm=norm,
        final_norm=IdentityNorm,
        block=hf.AddNormBlock,
        token_types=config["type_vocab_size"],
        key=key,
    )


def _map_nomic_bert_names(config: hf.Config) -> hf.NameMap:
    """Return the name map of files."""
    block = {
        "attn.Wqkv": hf.fused(*(f"bidirectional_attention.{name}" for name in ("query", "key", "value"))),
        "attn.out_proj": "bidirectional_attention.out",
        "norm1": "mixer_norm",
        **hf.prefixed("mlp", "gated_mlp", {"fc11": "up", "fc12": "gate", "fc2": "down"}),
        "norm2": "ffn_norm",
    }
    layers = {"emb_ln": "embedding_norm", **hf.prefixed("encoder.layers.*", "layers.*", block)}
    return _map_shell(config, layers)


def _map_nomic_bert_memory_names(config: hf.Config) -> hf.NameMap:
    attention = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}
    block = {
        **hf.prefixed("self_attn", "bidirectional_attention", attention),
        "post_attention_layernorm": "mixer_norm",
        **hf.prefixed("mlp", "gated_mlp", {"up_proj": "up", "gate_proj": "gate", "down_proj": "down"}),
        "post_mlp_layernorm": "ffn_norm",
    }
    layers = {"embeddings.LayerNorm": "embedding_norm", **hf.prefixed("layers.*", "layers.*", block)}
    return _map_shell(config, layers)


def _map_shell(config: hf.Config, layers: hf.NameMap) -> hf.NameMap:
    """Return the name map with embeddings and the head, which are named the same in files and in memory."""
    embeddings = {"word_embeddings": "embedding", "token_type_embeddings": "type_embedding"}
    transform = hf.map_dense_layer("cls.predictions.transform", "head.transform", "layer_norm")
    pooler = hf.map_dense_layer("nomic_bert.pooler", "head.transform")
    heads: dict[str, hf.NameMap] = {
        "MaskedLM": {"cls.predictions.bias": "head.bias", **transform},
        "SequenceClassification": {**pooler, "classifier": "head.linear"},
        "TokenClassification": {"classifier": "head.linear"},
        "Model": {},
    }
    base = {**hf.prefixed("embeddings", "", embeddings), **layers}
    return {**hf.prefixed("nomic_bert", "", base), **hf.select_names(config, "NomicBert", heads)}


_HEADS = ("cls.predictions.transform", "cls.predictions.bias", "pooler.")

NOMIC_BERT = hf.Family(
    name="nomic_bert",
    architecture="NomicBertForMaskedLM",
    build=_build_nomic_bert,
    names=_map_nomic_bert_names,
    defaults={
        **bert.DEFAULTS,
        "vocab_size": 30528,
        "head_dim": hf.optional_count(),
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "type_vocab_size": hf.non_negative(2),
        "rope_parameters": {"rope_theta": 1000.0},
    },
    required_values={"tie_word_embeddings": (True,)},
    ignored_tensors=(*bert.BERT.ignored_tensors, r"\.rotary_emb\.inv_freq$"),
    find_ignored_tensors=partial(hf.find_other_heads, _map_nomic_bert_names, "nomic_bert", _HEADS),
    memory_names=_map_nomic_bert_memory_names,
    head="cls.predictions.decoder",
    embedding="nomic_bert.embeddings.word_embeddings",
)
