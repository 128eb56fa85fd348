"""BERT (Devlin et al., arXiv:1810.04805): attention in both directions, learned positions and token types, LayerNorms
after the residual sums, biases everywhere."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import IdentityNorm
from zoo.models.hf import grammar as hf


def _build_bert(config: hf.Config, *, key: Key[Array, ""]) -> hf.Encoder:
    size = config["hidden_size"]
    norm = hf.make_layer_norm_factory(config)
    transform = partial(hf.DenseTransform, size, activation=hf.find_activation(config), norm=norm)
    heads = hf.make_bert_heads(config, transform, has_pooler=True)
    return build_bert_layers(config, "Bert", heads, positions=config["max_position_embeddings"], key=key)


def build_bert_layers(
    config: hf.Config, prefix: str, heads: dict[str, Any], *, mixer: Callable[..., Any] | None = None, **options: Any
) -> hf.Encoder:
    """Build an encoder of BERT's layers with one of these heads, by what follows `prefix` in its architecture. `mixer`
    is a factory of another attention, and `options` are those of `build_encoder` that differ."""
    norm = hf.make_layer_norm_factory(config)
    if mixer is None:
        mixer = hf.make_bidirectional_attention_factory(config, bias=True, out_bias=True)
    parts = {
        "norm": norm,
        "embedding_norm": norm,
        "final_norm": IdentityNorm,
        "block": hf.AddNormBlock,
        "token_types": config.get("type_vocab_size", 0),
        **options,
    }
    layers = [(mixer, hf.make_mlp_factory(config))] * config["num_hidden_layers"]
    return hf.build_config_encoder(config, layers, prefix, heads, **parts)


ATTENTION_NAMES: hf.NameMap = {
    **hf.prefixed("self", "bidirectional_attention", {name: name for name in ("query", "key", "value")}),
    "output.dense": "bidirectional_attention.out",
    "output.LayerNorm": "mixer_norm",
}


def map_bert_layers(prefix: str, attention: hf.NameMap = ATTENTION_NAMES) -> hf.NameMap:
    """Map the tensors of BERT's layers, which are in the module `prefix` in transformers. `attention` maps the module
    `attention` of a layer."""
    block = {
        **hf.prefixed("attention", "", attention),
        "intermediate.dense": "mlp.up",
        "output.dense": "mlp.down",
        "output.LayerNorm": "ffn_norm",
    }
    return {**map_embeddings(prefix), **hf.prefixed(f"{prefix}.encoder.layer.*", "layers.*", block)}


def map_embeddings(prefix: str) -> hf.NameMap:
    """Map the tensors of BERT's embeddings, which are in the module `prefix` in transformers."""
    embeddings = {
        "word_embeddings": "embedding",
        "position_embeddings": "position_embedding",
        "token_type_embeddings": "type_embedding",
        "LayerNorm": "embedding_norm",
    }
    return hf.prefixed(f"{prefix}.embeddings", "", embeddings)


def _map_bert_names(config: hf.Config) -> hf.NameMap:
    transform = hf.map_dense_layer("cls.predictions.transform", "head.transform", "LayerNorm")
    pooler = hf.map_dense_layer("bert.pooler", "head.transform")
    heads: dict[str, hf.NameMap] = {
        "MaskedLM": {"cls.predictions.bias": "head.bias", **transform},
        "SequenceClassification": {**pooler, "classifier": "head.linear"},
        "TokenClassification": {"classifier": "head.linear"},
        "Model": {"bert.pooler.dense": "head.pooler.linear"},
    }
    return {**map_bert_layers("bert"), **hf.select_names(config, "Bert", heads)}


_HEADS = ("cls.seq", "cls.predictions.transform", "cls.predictions.bias", "pooler.")
DEFAULTS: dict[str, Any] = {
    **hf.HEAD_DEFAULTS,
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": hf.non_negative(2),
    "layer_norm_eps": 1e-12,
}

BERT = hf.Family(
    name="bert",
    architecture="BertForMaskedLM",
    build=_build_bert,
    names=_map_bert_names,
    defaults=DEFAULTS,
    required_values={**hf.ONLY_ENCODERS, "tie_word_embeddings": (True,)},
    ignored_tensors=(r"embeddings\.position_ids$", r"^cls\.predictions\.decoder\.bias$"),
    find_ignored_tensors=partial(
        hf.find_other_heads,
        _map_bert_names,
        "bert",
        _HEADS,
    ),
    older_endings={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    head="cls.predictions.decoder",
    embedding="bert.embeddings.word_embeddings",
)
