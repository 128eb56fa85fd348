"""EuroBERT (Boizard et al., arXiv:2503.05500): LLaMA's layers, with attention in both directions."""

from functools import partial

from jaxtyping import Array, Key

from zoo.models.decoder import Block
from zoo.models.encoders.heads import DenseTransform
from zoo.models.encoders.text import Encoder
from zoo.models.hf.builders import (
    build_rotary,
    find_activation,
    make_bidirectional_attention_factory,
    make_gated_mlp_factory,
    make_rms_norm_factory,
)
from zoo.models.hf.spec import Config, Family, NameMap, prefixed

from .. import encoder_heads, text_encoders
from . import llama


def _build_eurobert(config: Config, *, key: Key[Array, ""]) -> Encoder:
    norm = make_rms_norm_factory(config)
    gelu = find_activation(Config(hidden_act="gelu"))
    bias = dict.fromkeys(("bias", "out_bias"), config["attention_bias"])
    mixer = make_bidirectional_attention_factory(config, rotary=build_rotary(config), **bias)
    layers = [(mixer, make_gated_mlp_factory(config, bias=config["mlp_bias"]))] * config["num_hidden_layers"]
    transform = partial(DenseTransform, config["hidden_size"], activation=gelu)
    pooling = config["classifier_pooling"]
    heads = {
        "MaskedLM": text_encoders.make_masked_lm_head_factory(config, None, bias=config["mlp_bias"]),
        "SequenceClassification": text_encoders.make_pooled_head_factory(config, transform, pooling=pooling),
        "TokenClassification": text_encoders.make_token_head_factory(config),
        "Model": encoder_heads.make_feature_head_factory(),
    }
    options = {"norm": norm, "final_norm": norm, "block": Block}
    return text_encoders.build_config_encoder(config, layers, "EuroBert", heads, key=key, **options)


def _map_eurobert_names(config: Config) -> NameMap:
    names = llama.map_llama_layers(
        prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES),
        prefixed("self_attn", "bidirectional_attention", llama.ATTENTION_NAMES),
    )
    head = "head.tokens" if config["classifier_pooling"] == "late" else "head"
    heads: dict[str, NameMap] = {
        "MaskedLM": {"lm_head": "head.decoder", "lm_head.bias": "head.bias"},
        "SequenceClassification": prefixed("", head, {"dense": "transform.linear", "classifier": "linear"}),
        "TokenClassification": {"classifier": "head.linear"},
        "Model": {},
    }
    return {**names, **encoder_heads.select_names(config, "EuroBert", heads)}


EUROBERT = Family(
    name="eurobert",
    architecture="EuroBertForMaskedLM",
    build=_build_eurobert,
    names=_map_eurobert_names,
    defaults={
        **encoder_heads.HEAD_DEFAULTS,
        **{key: value for key, value in llama.DEFAULTS.items() if key != "max_position_embeddings"},
        "vocab_size": 128256,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "classifier_pooling": "late",
    },
    ignored_keys=frozenset({"mask_token_id", "pretraining_tp"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
