"""RoFormer (Su et al., arXiv:2104.09864): BERT with RoPE in place of learned positions, and embeddings that may have
another size, as in ELECTRA."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import LayerNorm
from zoo.models.hf import grammar as hf
from zoo.ops.rotary import Rotary

from . import bert


def _build_roformer(config: hf.Config, *, key: Key[Array, ""]) -> hf.Encoder:
    size = config["hidden_size"]
    embedding_size = config["embedding_size"] or size
    norm = partial(LayerNorm, embedding_size, epsilon=config["layer_norm_eps"])
    activation = hf.find_activation(config)
    transform = partial(hf.DenseTransform, size, size=embedding_size, activation=activation, norm=norm)
    rotary = Rotary(hf.read_head_sizes(config)[2], 10_000.0, interleaved=True)
    mixer = hf.make_bidirectional_attention_factory(config, rotary=rotary, bias=True, out_bias=True)
    heads = hf.make_bert_heads(config, transform, activation=activation)
    options = {"embedding_size": None if embedding_size == size else embedding_size, "embedding_norm": norm}
    return bert.build_bert_layers(config, "RoFormer", heads, mixer=mixer, key=key, **options)


def _map_roformer_names(config: hf.Config) -> hf.NameMap:
    transform = hf.map_dense_layer("cls.predictions.transform", "head.transform", "LayerNorm")
    heads: dict[str, hf.NameMap] = {
        "MaskedLM": {"cls.predictions.bias": "head.bias", **transform},
        "SequenceClassification": {"classifier.dense": "head.transform.linear", "classifier.out_proj": "head.linear"},
        "TokenClassification": {"classifier": "head.linear"},
        "Model": {},
    }
    layers = hf.omit(bert.map_bert_layers("roformer"), "roformer.embeddings.position_embeddings")
    projection = {"roformer.embeddings_project": "embedding_projection"}
    return {**layers, **projection, **hf.select_names(config, "RoFormer", heads)}


ROFORMER = hf.Family(
    name="roformer",
    architecture="RoFormerForMaskedLM",
    build=_build_roformer,
    names=_map_roformer_names,
    defaults={
        **hf.omit(bert.DEFAULTS, "max_position_embeddings"),
        "vocab_size": 50000,
        "embedding_size": hf.optional_count(),
    },
    required_values={**hf.ONLY_ENCODERS, "tie_word_embeddings": (True,), "rotary_value": (False,)},
    ignored_keys=frozenset({"max_position_embeddings"}),
    ignored_tensors=(r"embed_positions\.weight$", r"^cls\.predictions\.decoder\.bias$"),
    find_ignored_tensors=partial(hf.find_other_heads, _map_roformer_names, "roformer", ("cls.", "pooler.")),
    head="cls.predictions.decoder",
    embedding="roformer.embeddings.word_embeddings",
)
