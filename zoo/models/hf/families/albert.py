"""ALBERT (Lan et al., arXiv:1909.11942): BERT's layers with parameters that several layers share, and embeddings of
another size, which a linear layer projects."""

from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Key

from zoo.layers import Dropout, IdentityNorm, LayerNorm
from zoo.models.hf import grammar as hf

from . import bert


def _build_albert(config: hf.Config, *, key: Key[Array, ""]) -> hf.Encoder:
    norm = hf.make_layer_norm_factory(config)
    embedding_norm = partial(LayerNorm, config["embedding_size"], epsilon=config["layer_norm_eps"])
    mixer = hf.make_bidirectional_attention_factory(config, bias=True, out_bias=True)
    ffn = hf.make_mlp_factory(config)

    def make_block(key: Key[Array, ""]) -> hf.AddNormBlock:
        mixer_key, ffn_key = jax.random.split(key)
        parts = {"mixer": mixer(key=mixer_key), "ffn": ffn(key=ffn_key), "dropout": Dropout(0.0)}
        return hf.AddNormBlock(mixer_norm=norm(), ffn_norm=norm(), **parts)

    inner = config["inner_group_num"]
    groups = _list_groups(config)
    shared = [make_block] * (config["num_hidden_groups"] * inner)
    calls = [partial(hf.make_shared_block, number) for number in range(len(shared))]
    layers = [calls[group * inner + i] for group in groups for i in range(inner)]
    transform = partial(
        hf.DenseTransform,
        config["hidden_size"],
        size=config["embedding_size"],
        activation=hf.find_activation(config),
        norm=embedding_norm,
    )
    heads = hf.make_bert_heads(config, transform, has_pooler=True)
    parts = {
        "embedding_size": config["embedding_size"],
        "positions": config["max_position_embeddings"],
        "token_types": config["type_vocab_size"],
        "embedding_norm": embedding_norm,
        "norm": norm,
        "final_norm": IdentityNorm,
        "block": hf.AddNormBlock,
    }
    return hf.build_config_encoder(config, layers, "Albert", heads, shared=shared, key=key, **parts)


def _list_groups(config: hf.Config) -> list[int]:
    """Return the group that each run of `inner_group_num` layers belongs to, rounded as the class in transformers does.

    **Raises** `ConfigError` for a group without a run, and for more layers than can be built.
    """
    runs = config["num_hidden_layers"]
    groups = config["num_hidden_groups"]
    if runs * config["inner_group_num"] > _MOST_LAYERS:  # 10^9 layers, if only in shapes, would never end
        raise hf.ConfigError(
            f"num_hidden_layers * inner_group_num are at most {_MOST_LAYERS}, not {runs} * {config['inner_group_num']}"
        )
    if groups > runs:
        raise hf.ConfigError(
            f"num_hidden_groups = {groups}, and num_hidden_layers = {runs} are too few to run them all"
        )
    return [int(i / (runs / groups)) for i in range(runs)]


def _map_albert_names(config: hf.Config) -> hf.NameMap:
    attention = {name: f"bidirectional_attention.{name}" for name in ("query", "key", "value")}
    block = {
        **hf.prefixed(
            "attention", "", {**attention, "dense": "bidirectional_attention.out", "LayerNorm": "mixer_norm"}
        ),
        "ffn": "mlp.up",
        "ffn_output": "mlp.down",
        "full_layer_layer_norm": "ffn_norm",
    }
    rows = {**bert.map_embeddings("albert"), "albert.encoder.embedding_hidden_mapping_in": "embedding_projection"}
    inner = config["inner_group_num"]
    for number in range(config["num_hidden_groups"] * inner):
        group, i = divmod(number, inner)
        path = f"albert.encoder.albert_layer_groups.{group}.albert_layers.{i}"
        rows |= hf.prefixed(path, f"shared.{number}", block)
    heads: dict[str, hf.NameMap] = {
        "MaskedLM": {
            **hf.map_dense_layer("predictions", "head.transform", "LayerNorm"),
            "predictions.bias": "head.bias",
        },
        "SequenceClassification": {"albert.pooler": "head.transform.linear", "classifier": "head.linear"},
        "TokenClassification": {"classifier": "head.linear"},
        "Model": {"albert.pooler": "head.pooler.linear"},
    }
    return {**rows, **hf.select_names(config, "Albert", heads)}


_MOST_LAYERS = 1024
_HEADS = ("predictions.dense.", "predictions.LayerNorm.", "predictions.bias", "sop_classifier.", "pooler.")
_DEFAULTS: dict[str, Any] = {
    **bert.DEFAULTS,
    "vocab_size": 30000,
    "embedding_size": 128,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_groups": 1,
    "inner_group_num": 1,
    "num_attention_heads": 64,
    "hidden_act": "gelu_new",
}

ALBERT = hf.Family(
    name="albert",
    architecture="AlbertForMaskedLM",
    build=_build_albert,
    names=_map_albert_names,
    defaults=_DEFAULTS,
    required_values=bert.BERT.required_values,
    ignored_keys=frozenset(
        {
            "classifier_dropout_prob",
            # of the paper's own code, and read by no class of transformers
            *("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks", "layers_to_keep"),
        }
    ),
    ignored_tensors=(r"embeddings\.position_ids$", r"^predictions\.decoder\.bias$"),
    find_ignored_tensors=partial(hf.find_other_heads, _map_albert_names, "albert", _HEADS),
    head="predictions.decoder",
    embedding="albert.embeddings.word_embeddings",
)
