"""DeBERTa v2 and v3 (He et al., arXiv:2006.03654 and 2111.09543): BERT's layers with disentangled attention, which
reads relative positions in logarithmic buckets from a table that all layers share. Files of v3 name the masked-LM head
otherwise, which `"legacy": false` in the config reads."""

from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import IdentityNorm
from zoo.models.hf import grammar as hf

from .bert import DEFAULTS, map_bert_layers
from .deberta_v2_layers import DisentangledAttention, check_distances


def _is_list_of_terms(value: Any) -> bool:
    """Return True for the terms of position in the scores of DeBERTa."""
    if isinstance(value, str):
        terms = [term.strip() for term in value.lower().split("|")]
    else:
        terms = value
    return hf.list_of(hf.WORD).fits(terms) and set(terms) <= {"c2p", "p2c"}


_TERMS = hf.ValueKind("a list of c2p and p2c, or these words with | between", _is_list_of_terms)
_COUNT_OR_NONE = hf.ValueKind("a whole number above 0, or -1", lambda x: hf.integer(minimum=-1).fits(x) and x != 0)
_NORM_NAME = hf.ValueKind("none or layer_norm", lambda value: hf.WORD.fits(value) and value in ("none", "layer_norm"))


def _build_deberta(config: hf.Config, *, key: Key[Array, ""]) -> hf.Encoder:
    size = config["hidden_size"]
    heads = config["num_attention_heads"]
    norm = hf.make_layer_norm_factory(config)
    for name, right in (("attention_head_size", size // heads), ("pooler_hidden_size", size)):
        if config[name] not in (None, right):
            raise hf.ConfigError(f"{name} = {config[name]}, and only {right} fits hidden_size = {size}")
    transform = partial(hf.DenseTransform, size, activation=hf.find_activation(config), norm=norm)
    activation = hf.find_activation(config, "pooler_hidden_act")
    makers = hf.make_bert_heads(config, transform, activation=activation)
    mixer, relative = _make_attention_factories(config)
    options: dict[str, Any] = {
        "norm": norm,
        "embedding_norm": norm,
        "final_norm": IdentityNorm,
        "token_types": config["type_vocab_size"],
        "positions": None,
        "block": hf.AddNormBlock,
        "relative_embedding": relative,
    }
    if config["position_biased_input"]:
        options["positions"] = config["max_position_embeddings"]
    if relative is not None:
        options["block"] = hf.RelativeBlock
    layers = [(mixer, hf.make_mlp_factory(config))] * config["num_hidden_layers"]
    return hf.build_config_encoder(config, layers, "DebertaV2", makers, key=key, **options)


def _make_attention_factories(config: hf.Config) -> tuple[Any, Any]:
    """Return factories of attention and of the table of relative positions, None without relative attention."""
    terms = config["pos_att_type"] or []
    if isinstance(terms, str):
        terms = [term.strip() for term in terms.lower().split("|")]
    if config["relative_attention"] != bool(terms):
        raise hf.ConfigError(
            f"relative_attention = {config['relative_attention']} with pos_att_type = {config['pos_att_type']}: "
            "relative attention has c2p, p2c or both, and other attention neither"
        )
    size = config["hidden_size"]
    heads = config["num_attention_heads"]
    if not terms:
        return hf.make_bidirectional_attention_factory(config, bias=True, out_bias=True), None
    buckets = config["position_buckets"] if config["position_buckets"] > 0 else None
    longest = config["max_relative_positions"]
    if longest <= 0:
        longest = config["max_position_embeddings"]
    try:
        check_distances(longest, buckets)
    except ValueError as error:
        raise hf.ConfigError(f"position_buckets and max_relative_positions: {error}") from None
    if config["norm_rel_ebd"] == "layer_norm":
        norm = hf.make_layer_norm_factory(config)
    else:
        norm = None
    options = {"max_distance": longest, "buckets": buckets, "terms": tuple(terms), "shared": config["share_att_key"]}
    mixer = partial(DisentangledAttention, size, heads, out_scale=hf.compute_out_scale(config), **options)
    return mixer, partial(hf.RelativeEmbedding, buckets or longest, size, norm=norm, scale=size**-0.5)


def _map_deberta_names(config: hf.Config) -> hf.NameMap:
    if config["relative_attention"]:
        mixer = "disentangled_attention"
    else:
        mixer = "bidirectional_attention"
    projections = {
        **{f"self.{name}_proj": name for name in ("query", "key", "value")},
        **{f"self.pos_{name}_proj": f"position_{name}" for name in ("query", "key")},
        "output.dense": "out",
    }
    attention = {**hf.prefixed("", mixer, projections), "output.LayerNorm": "mixer_norm"}
    relative = {"rel_embeddings": "relative_embedding", "LayerNorm": "relative_embedding.norm"}
    masked = "cls.predictions" if config["legacy"] else "lm_predictions.lm_head"
    dense = "cls.predictions.transform" if config["legacy"] else masked
    pooler = hf.map_dense_layer("pooler", "head.transform")
    heads: dict[str, hf.NameMap] = {
        "MaskedLM": {
            f"{masked}.bias": "head.bias",
            **hf.map_dense_layer(dense, "head.transform", "LayerNorm"),
        },
        "SequenceClassification": {**pooler, "classifier": "head.linear"},
        "TokenClassification": {"classifier": "head.linear"},
        "Model": {},
    }
    return {
        **map_bert_layers("deberta", attention),
        **hf.prefixed("deberta.encoder", "", relative),
        **hf.select_names(config, "DebertaV2", heads),
    }


DEBERTA_V2 = hf.Family(
    name="deberta-v2",
    architecture="DebertaV2ForMaskedLM",
    build=_build_deberta,
    names=_map_deberta_names,
    defaults={
        **DEFAULTS,
        "vocab_size": 128100,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 24,
        "type_vocab_size": hf.non_negative(0),
        "layer_norm_eps": 1e-7,
        **dict.fromkeys(("relative_attention", "share_att_key"), False),
        **dict.fromkeys(("position_biased_input", "legacy"), True),
        **dict.fromkeys(("max_relative_positions", "position_buckets"), hf.Default(-1, _COUNT_OR_NONE)),
        **dict.fromkeys(("attention_head_size", "pooler_hidden_size"), hf.optional_count()),
        "pos_att_type": hf.Default(None, hf.optional(_TERMS)),
        "norm_rel_ebd": hf.Default("none", _NORM_NAME),
        "pooler_hidden_act": "gelu",
    },
    required_values={"tie_word_embeddings": (True,), "conv_kernel_size": (None, 0), "embedding_size": (None,)},
    ignored_keys=frozenset({"pooler_dropout", "cls_dropout", "conv_act", "conv_groups"}),
    ignored_tensors=(
        *(r"^(deberta\.)?embeddings\.position_(ids$|embeddings\.)", r"^mask_predictions\."),
        *(r"^cls\.", r"^lm_predictions\.", r"^pooler\."),
    ),
    head="cls.predictions.decoder",
    embedding="deberta.embeddings.word_embeddings",
)
