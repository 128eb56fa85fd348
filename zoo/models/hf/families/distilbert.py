"""DistilBERT (Sanh et al., arXiv:1910.01108): BERT's layers, half as many, without token types and without a pooler."""

from functools import partial

import jax
from jaxtyping import Array, Key

from zoo.layers import IdentityNorm, LayerNorm
from zoo.models.hf import grammar as hf

from . import bert


def _build_distilbert(config: hf.Config, *, key: Key[Array, ""]) -> hf.Encoder:
    size = config["hidden_size"]
    norm = partial(LayerNorm, size, epsilon=1e-12)
    transform = partial(hf.DenseTransform, size, activation=hf.find_activation(config), norm=norm)
    heads = hf.make_bert_heads(config, transform, activation=jax.nn.relu)
    layer = (hf.make_bidirectional_attention_factory(config, bias=True, out_bias=True), hf.make_mlp_factory(config))
    return hf.build_config_encoder(
        config,
        [layer] * config["num_hidden_layers"],
        "DistilBert",
        heads,
        norm=norm,
        embedding_norm=norm,
        final_norm=IdentityNorm,
        block=hf.AddNormBlock,
        positions=config["max_position_embeddings"],
        key=key,
    )


def _map_distilbert_names(config: hf.Config) -> hf.NameMap:
    attention = {"q_lin": "query", "k_lin": "key", "v_lin": "value", "out_lin": "out"}
    block = {
        **hf.prefixed("attention", "bidirectional_attention", attention),
        "sa_layer_norm": "mixer_norm",
        "ffn.lin1": "mlp.up",
        "ffn.lin2": "mlp.down",
        "output_layer_norm": "ffn_norm",
    }
    embeddings = {
        "word_embeddings": "embedding",
        "position_embeddings": "position_embedding",
        "LayerNorm": "embedding_norm",
    }
    layers = {**hf.prefixed("embeddings", "", embeddings), **hf.prefixed("transformer.layer.*", "layers.*", block)}
    transform = {"vocab_transform": "head.transform.linear", "vocab_layer_norm": "head.transform.norm"}
    heads: dict[str, hf.NameMap] = {
        "MaskedLM": {**transform, "vocab_projector.bias": "head.bias"},
        "SequenceClassification": {"pre_classifier": "head.transform.linear", "classifier": "head.linear"},
        "TokenClassification": {"classifier": "head.linear"},
        "Model": {},
    }
    return {**hf.prefixed("distilbert", "", layers), **hf.select_names(config, "DistilBert", heads)}


_HEADS = ("vocab_transform", "vocab_layer_norm", "vocab_projector")

DISTILBERT = hf.Family(
    name="distilbert",
    architecture="DistilBertForMaskedLM",
    build=_build_distilbert,
    names=_map_distilbert_names,
    defaults={
        **hf.omit(bert.DEFAULTS, "type_vocab_size", "layer_norm_eps"),
        "num_hidden_layers": 6,
    },
    aliases={
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "activation": "hidden_act",
    },
    required_values={
        "tie_word_embeddings": (True,),
        **dict.fromkeys(("intermediate_size", "hidden_act"), (None,)),  # transformers reads neither
    },
    # sinusoidal_pos_embds says with which positions training began; they are in the file
    ignored_keys=frozenset({"dropout", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_"}),
    ignored_tensors=bert.BERT.ignored_tensors,
    find_ignored_tensors=partial(hf.find_other_heads, _map_distilbert_names, "distilbert", _HEADS),
    head="vocab_projector",
    embedding="distilbert.embeddings.word_embeddings",
)
