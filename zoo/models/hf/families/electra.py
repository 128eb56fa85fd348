"""ELECTRA (Clark et al., arXiv:2003.10555): BERT's layers with embeddings of another size, which a linear layer
projects. Its generator is a masked LM, and its discriminator tells replaced tokens from others."""

from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import LayerNorm
from zoo.models.hf import grammar as hf

from . import bert


def _build_electra(config: hf.Config, *, key: Key[Array, ""]) -> hf.Encoder:
    size = config["hidden_size"]
    embedding_size = config["embedding_size"]
    norm = partial(LayerNorm, embedding_size, epsilon=config["layer_norm_eps"])
    gelu = hf.find_activation(hf.Config(hidden_act="gelu"))
    transform = partial(hf.DenseTransform, size, size=embedding_size, activation=gelu, norm=norm)
    heads = {
        **hf.make_bert_heads(config, transform, activation=gelu),
        "PreTraining": _make_replaced_token_head_factory(config),
    }
    options = {"embedding_size": None if embedding_size == size else embedding_size, "embedding_norm": norm}
    return bert.build_bert_layers(
        config, "Electra", heads, positions=config["max_position_embeddings"], key=key, **options
    )


def _make_replaced_token_head_factory(config: hf.Config) -> hf.HeadFactory:
    size = config["hidden_size"]
    transform = partial(hf.DenseTransform, size, activation=hf.find_activation(config))

    def make_head(key: Key[Array, ""]) -> hf.ReplacedTokenHead:
        return hf.ReplacedTokenHead(hf.TokenClassificationHead(size, 1, transform=transform, key=key))

    return make_head


def _map_electra_names(config: hf.Config) -> hf.NameMap:
    heads: dict[str, hf.NameMap] = {
        "MaskedLM": {
            **hf.map_dense_layer("generator_predictions", "head.transform", "LayerNorm"),
            "generator_lm_head.bias": "head.bias",
        },
        "PreTraining": {
            **hf.map_dense_layer("discriminator_predictions", "head.tokens.transform"),
            "discriminator_predictions.dense_prediction": "head.tokens.linear",
        },
        "SequenceClassification": {
            **hf.map_dense_layer("classifier", "head.transform"),
            "classifier.out_proj": "head.linear",
        },
        "TokenClassification": {"classifier": "head.linear"},
        "Model": {},
    }
    return {
        **bert.map_bert_layers("electra"),
        "electra.embeddings_project": "embedding_projection",
        **hf.select_names(config, "Electra", heads),
    }


_HEADS = ("generator_predictions.", "generator_lm_head.bias", "discriminator_predictions.")
_DEFAULTS: dict[str, Any] = {
    **bert.DEFAULTS,
    "embedding_size": 128,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}

ELECTRA = hf.Family(
    name="electra",
    architecture="ElectraForMaskedLM",
    build=_build_electra,
    names=_map_electra_names,
    defaults=_DEFAULTS,
    required_values=bert.BERT.required_values,
    # summary_* are of classes for multiple choice
    ignored_keys=frozenset({"summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout"}),
    ignored_tensors=(r"embeddings\.position_ids$",),
    find_ignored_tensors=partial(hf.find_other_heads, _map_electra_names, "electra", _HEADS),
    head="generator_lm_head",
    embedding="electra.embeddings.word_embeddings",
)
