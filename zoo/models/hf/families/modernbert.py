"""ModernBERT (Warner et al., arXiv:2412.13663): pre-norm layers with RoPE, GeGLU and no biases; of three layers, two
attend to a window on both sides, with a RoPE of smaller base."""

from functools import partial
from typing import Any

import equinox as eqx
from jaxtyping import Array, Key

from zoo.layers import GatedMLP, LayerNorm
from zoo.layers.encoders.bidirectional_attention import BidirectionalAttention
from zoo.models.hf import grammar as hf
from zoo.ops.rotary import Rotary


def _build_modernbert(config: hf.Config, *, key: Key[Array, ""]) -> hf.Encoder:
    norm = hf.make_layer_norm_factory(config, bias=config["norm_bias"])
    numbers = range(config["num_hidden_layers"])
    is_local = [number % config["global_attn_every_n_layers"] != 0 for number in numbers]
    types = hf.read_layer_types(config, hf.list_layer_types(is_local))
    windows = hf.list_layer_windows(types, config["local_attention"] // 2 + 1)  # to each side, with the token itself
    bias = dict.fromkeys(("bias", "out_bias"), config["attention_bias"])
    make = partial(hf.make_bidirectional_attention_factory, config, **bias)
    kinds = dict(zip(types, windows, strict=True))
    mixers = {
        kind: make(window=window, rotary=hf.build_rotary(config, layer_type=kind)) for kind, window in kinds.items()
    }
    ffn = hf.make_gated_mlp_factory(config, bias=config["mlp_bias"])
    options = {"activation": hf.find_activation(config, "classifier_activation"), "bias": config["classifier_bias"]}
    transform = partial(hf.DenseTransform, config["hidden_size"], norm=norm, **options)
    pooling = config["classifier_pooling"]
    heads = {
        "MaskedLM": hf.make_masked_lm_head_factory(config, transform, bias=config["decoder_bias"]),
        "SequenceClassification": hf.make_pooled_head_factory(config, transform, pooling=pooling),
        "TokenClassification": hf.make_token_head_factory(config, transform),
        "Model": hf.make_feature_head_factory(),
    }
    layers = [(mixers[kind], ffn) for kind in types]
    blocks = [hf.make_unnormalized_block, *[hf.Block] * (len(numbers) - 1)]
    norms = {"norm": norm, "embedding_norm": norm, "final_norm": norm}
    return hf.build_config_encoder(config, layers, "ModernBert", heads, block=blocks, key=key, **norms)


def _describe_modernbert(model: Any) -> dict[str, Any]:
    """Return every config key of a masked language model, read off its last layer. The caller verifies the rest.

    **Raises** `ConfigError` for other classes of layers.
    """
    hf.check_type("model", model, hf.Encoder)
    model, blocks = eqx.filter_eval_shape(lambda model: (model, tuple(model.stack.iter_blocks())), model)
    hf.check_type("head", model.head, hf.MaskedLMHead)
    block = blocks[-1]
    parts = {"mixer": BidirectionalAttention, "ffn": GatedMLP, "ffn_norm": LayerNorm}
    for name, kind in parts.items():
        hf.check_type(name, getattr(block, name, None), kind)
    rope = block.mixer.rotary
    windows = [getattr(block.mixer, "window", None) for block in blocks]
    hf.check_type("rotary", rope, Rotary)
    kinds = ("full_attention", "sliding_attention")
    window = next((w for w in windows if w is not None), 1)
    vocab, embed = model.embedding.table_shape
    return {
        "vocab_size": vocab,
        "hidden_size": embed,
        "intermediate_size": block.ffn.gate.out_size,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": block.mixer.query.out_size // block.mixer.head_dim,
        "hidden_act": hf.find_activation_name(block.ffn.activation),
        "layer_norm_eps": block.ffn_norm.epsilon,
        "attention_bias": hf.has_bias(block.mixer.query),
        "mlp_bias": hf.has_bias(block.ffn.gate),
        "norm_bias": block.ffn_norm.bias is not None,
        "layer_types": [kinds[window is not None] for window in windows],
        "local_attention": 2 * (window - 1),
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": rope.base} for kind in kinds},
        "decoder_bias": model.head.bias is not None,
        "tie_word_embeddings": model.head.decoder is None,
        "pad_token_id": 0,  # transformers refuses its default of 50283 in a smaller vocabulary
    }


def _map_modernbert_names(config: hf.Config) -> hf.NameMap:
    block = {
        "attn_norm": "mixer_norm",
        "attn.Wqkv": hf.fused(*(f"bidirectional_attention.{name}" for name in ("query", "key", "value"))),
        "attn.Wo": "bidirectional_attention.out",
        "mlp_norm": "ffn_norm",
        "mlp.Wi": hf.fused("gated_mlp.gate", "gated_mlp.up"),
        "mlp.Wo": "gated_mlp.down",
    }
    shell = {"embeddings.tok_embeddings": "embedding", "embeddings.norm": "embedding_norm", "final_norm": "norm"}
    transform = hf.map_dense_layer("head", "head.transform", "norm")
    classifier: hf.NameMap = {**transform, "classifier": "head.linear"}
    heads: dict[str, hf.NameMap] = {
        "MaskedLM": {**transform, "decoder.weight": "head.decoder.weight", "decoder.bias": "head.bias"},
        "SequenceClassification": classifier,
        "TokenClassification": classifier,
        "Model": {},
    }
    layers = {**shell, **hf.prefixed("layers.*", "layers.*", block)}
    return {**hf.prefixed("model", "", layers), **hf.select_names(config, "ModernBert", heads)}


MODERNBERT = hf.Family(
    name="modernbert",
    architecture="ModernBertForMaskedLM",
    build=_build_modernbert,
    names=_map_modernbert_names,
    defaults={
        **hf.HEAD_DEFAULTS,
        "vocab_size": 50368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "max_position_embeddings": 8192,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), False),
        "decoder_bias": True,
        "layer_types": hf.optional_words(),
        "global_attn_every_n_layers": 3,
        "local_attention": hf.Default(128, hf.integer()),
        "rope_parameters": {
            "full_attention": {"rope_theta": 160000.0},
            "sliding_attention": {"rope_theta": 10000.0},
        },
        "sliding_rope_theta": hf.optional_number(),
        "classifier_pooling": "cls",
        "classifier_activation": "gelu",
        "tie_word_embeddings": True,
    },
    aliases={
        "hidden_activation": "hidden_act",
        "norm_eps": "layer_norm_eps",
        "global_rope_theta": "rope_theta",
        "local_rope_theta": "sliding_rope_theta",
    },
    required_values={"sparse_prediction": (False,), "position_embedding_type": ("absolute",)},
    ignored_keys=frozenset(
        {
            *("embedding_dropout", "mlp_dropout"),
            *("deterministic_flash_attn", "initializer_cutoff_factor", "sparse_pred_ignore_index"),
        }
    ),
    describe=_describe_modernbert,
    head="decoder",
    embedding="model.embeddings.tok_embeddings",
)
