"""RoBERTa (Liu et al., arXiv:1907.11692): BERT's layers, with learned positions that begin after the number of the
padding token."""

import dataclasses
from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from .bert import BERT, DEFAULTS, build_bert_layers, map_bert_layers


def build_roberta(
    prefix: str, config: hf.Config, *, key: Key[Array, ""], offset: int | None = None, **options: Any
) -> hf.Encoder:
    """Build RoBERTa's encoder, with the head of the architecture that begins with `prefix`.

    - `offset`: rows of the table of positions before the first, `pad_token_id + 1` by default.
    - `options`: of `build_bert_layers`.

    **Raises** `ConfigError` for a table without further rows.
    """
    if offset is None:
        offset = config["pad_token_id"] + 1
    positions = config["max_position_embeddings"] - offset
    if positions < 1:
        raise hf.ConfigError(f"max_position_embeddings = {positions + offset}, and the first {offset} are not used")
    gelu = hf.find_activation(hf.Config(hidden_act="gelu"))
    transform = partial(
        hf.DenseTransform, config["hidden_size"], activation=gelu, norm=hf.make_layer_norm_factory(config)
    )
    heads = hf.make_bert_heads(config, transform, has_pooler=True)
    sizes = {"positions": positions, "position_offset": offset}
    return build_bert_layers(config, prefix, heads, key=key, **sizes, **options)


def map_roberta_names(prefix: str, config: hf.Config) -> hf.NameMap:
    """Return the name map of an architecture that begins with `prefix`."""
    return {**map_bert_layers("roberta"), **map_roberta_heads(prefix, "roberta", config)}


def map_roberta_heads(prefix: str, base: str, config: hf.Config) -> hf.NameMap:
    """Map the head of an architecture that begins with `prefix`. `base` is the module of the layers."""
    transform = hf.map_dense_layer("lm_head", "head.transform", "layer_norm")
    classify = hf.map_dense_layer("classifier", "head.transform")
    heads: dict[str, hf.NameMap] = {
        "MaskedLM": {"lm_head.bias": "head.bias", **transform},
        "SequenceClassification": {**classify, "classifier.out_proj": "head.linear"},
        "TokenClassification": {"classifier": "head.linear"},
        "Model": {f"{base}.pooler.dense": "head.pooler.linear"},
    }
    return hf.select_names(config, prefix, heads)


HEADS = ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "pooler.")
"""Tensors of heads that files have besides that of their architecture."""

_NAMES = partial(map_roberta_names, "Roberta")

ROBERTA = dataclasses.replace(
    BERT,
    name="roberta",
    architecture="RobertaForMaskedLM",
    build=partial(build_roberta, "Roberta"),
    names=_NAMES,
    defaults={**DEFAULTS, "vocab_size": 50265, "pad_token_id": hf.non_negative(1)},
    ignored_tensors=(r"embeddings\.position_ids$", r"^lm_head\.decoder\.bias$"),
    find_ignored_tensors=partial(hf.find_other_heads, _NAMES, "roberta", HEADS),
    head="lm_head.decoder",
    embedding="roberta.embeddings.word_embeddings",
)
