"""EuroBERT (Boizard et al., arXiv:2503.05500): LLaMA's layers, with attention in both directions."""

from functools import partial

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama


def _build_eurobert(config: hf.Config, *, key: Key[Array, ""]) -> hf.Encoder:
    norm = hf.make_rms_norm_factory(config)
    gelu = hf.find_activation(hf.Config(hidden_act="gelu"))
    bias = dict.fromkeys(("bias", "out_bias"), config["attention_bias"])
    mixer = hf.make_bidirectional_attention_factory(config, rotary=hf.build_rotary(config), **bias)
    layers = [(mixer, hf.make_gated_mlp_factory(config, bias=config["mlp_bias"]))] * config["num_hidden_layers"]
    transform = partial(hf.DenseTransform, config["hidden_size"], activation=gelu)
    pooling = config["classifier_pooling"]
    heads = {
        "MaskedLM": hf.make_masked_lm_head_factory(config, None, bias=config["mlp_bias"]),
        "SequenceClassification": hf.make_pooled_head_factory(config, transform, pooling=pooling),
        "TokenClassification": hf.make_token_head_factory(config),
        "Model": hf.make_feature_head_factory(),
    }
    options = {"norm": norm, "final_norm": norm, "block": hf.Block}
    return hf.build_config_encoder(config, layers, "EuroBert", heads, key=key, **options)


def _map_eurobert_names(config: hf.Config) -> hf.NameMap:
    names = llama.map_llama_layers(
        hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES),
        hf.prefixed("self_attn", "bidirectional_attention", llama.ATTENTION_NAMES),
    )
    head = "head.tokens" if config["classifier_pooling"] == "late" else "head"
    heads: dict[str, hf.NameMap] = {
        "MaskedLM": {"lm_head": "head.decoder", "lm_head.bias": "head.bias"},
        "SequenceClassification": hf.prefixed("", head, {"dense": "transform.linear", "classifier": "linear"}),
        "TokenClassification": {"classifier": "head.linear"},
        "Model": {},
    }
    return {**names, **hf.select_names(config, "EuroBert", heads)}


EUROBERT = hf.Family(
    name="eurobert",
    architecture="EuroBertForMaskedLM",
    build=_build_eurobert,
    names=_map_eurobert_names,
    defaults={
        **hf.HEAD_DEFAULTS,
        **hf.omit(llama.DEFAULTS, "max_position_embeddings"),
        "vocab_size": 128256,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "classifier_pooling": "late",
    },
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
