"""Vision Transformer (Dosovitskiy et al., arXiv:2010.11929): learned positions, pre-norm layers, and a class token that
a classifier or a dense pooler reads."""

from functools import partial
from typing import Any

import equinox as eqx
from jaxtyping import Array, Key

from zoo.layers import MLP, LayerNorm
from zoo.layers.encoders.bidirectional_attention import BidirectionalAttention
from zoo.layers.encoders.patches import PatchPositions
from zoo.layers.encoders.pooling import DensePooler
from zoo.models.hf import grammar as hf

from . import llama


def _build_vit(config: hf.Config, *, key: Key[Array, ""]) -> hf.ImageEncoder:
    size = config["hidden_size"]
    activation = hf.find_activation(config, "pooler_act")
    pooler = partial(DensePooler, size, config["pooler_output_size"] or size, activation=activation)
    heads = {
        "ViTForImageClassification": hf.make_classification_head_factory(config),
        "ViTModel": hf.make_feature_head_factory(pooler),
    }
    bias = config["qkv_bias"]
    layer = (
        hf.make_bidirectional_attention_factory(config, bias=bias, out_bias=True),
        hf.make_mlp_factory(config),
    )
    embedding = hf.make_image_embedding_factory(config)
    head = hf.select_head(config, heads)
    return hf.build_config_image_encoder(config, layer, hf.make_layer_norm_factory(config), head, embedding, key=key)


def _describe_vit(model: Any) -> dict[str, Any]:
    """Return every config key of an image classifier, read off its first layer. The caller verifies the rest.

    **Raises** `ConfigError` for other classes of layers.
    """
    hf.check_type("model", model, hf.ImageEncoder)
    model, block = eqx.filter_eval_shape(lambda model: (model, next(model.stack.iter_blocks())), model)
    hf.check_type("head", model.head, hf.ClassificationHead)
    hf.check_type("positions", model.embedding.positions, PatchPositions)
    for name, kind in {"mixer": BidirectionalAttention, "ffn": MLP, "mixer_norm": LayerNorm}.items():
        hf.check_type(name, getattr(block, name), kind)
    embed, channels, *patch = model.embedding.patches.weight.shape
    image = [count * size for count, size in zip(model.embedding.positions.grid, patch, strict=True)]
    return {
        "architectures": ["ViTForImageClassification"],
        "id2label": {str(number): str(number) for number in range(model.head.linear.out_size)},
        "hidden_size": embed,
        "num_hidden_layers": model.stack.count_layers(),
        "num_attention_heads": block.mixer.query.out_size // block.mixer.head_dim,
        "intermediate_size": block.ffn.up.out_size,
        "hidden_act": hf.find_activation_name(block.ffn.activation),
        "layer_norm_eps": block.mixer_norm.epsilon,
        "image_size": _format_size(image),
        "patch_size": _format_size(patch),
        "num_channels": channels,
        "qkv_bias": hf.has_bias(block.mixer.query),
    }


def _format_size(size: list[int]) -> int | list[int]:
    """Return one number for a square."""
    if size[0] == size[1]:
        return size[0]
    return size


CLASS_AND_POSITIONS: hf.NameMap = {
    "embeddings.cls_token": hf.TensorMapping(("embedding.class_token",), leading_ones=2),
    "embeddings.position_embeddings": hf.TensorMapping(("embedding.positions.weight",), leading_ones=1),
    "embeddings.patch_embeddings.projection": "embedding.patches",
}
ATTENTION_NAMES: hf.NameMap = {
    **hf.prefixed("attention", "", {name: name for name in ("query", "key", "value")}),
    "output.dense": "out",
}


def _map_vit_names(config: hf.Config) -> hf.NameMap:
    mlp = {"intermediate.dense": "mlp.up", "output.dense": "mlp.down"}
    return _map_vit_layers("encoder.layer.*", ATTENTION_NAMES, mlp)


def _map_vit_memory_names(config: hf.Config) -> hf.NameMap:
    return _map_vit_layers("layers.*", llama.ATTENTION_NAMES, {"mlp.fc1": "mlp.up", "mlp.fc2": "mlp.down"})


def _map_vit_layers(layers: str, attention: hf.NameMap, mlp: hf.NameMap) -> hf.NameMap:
    block = {
        "layernorm_before": "mixer_norm",
        "layernorm_after": "ffn_norm",
        **hf.prefixed("attention", "bidirectional_attention", attention),
        **mlp,
    }
    shell = {**CLASS_AND_POSITIONS, **hf.prefixed(layers, "layers.*", block), "layernorm": "norm"}
    heads = {"pooler.dense": "head.pooler.linear"}
    return {**hf.prefixed("vit", "", {**shell, **heads}), "classifier": "head.linear"}


VIT = hf.Family(
    name="vit",
    architecture="ViTForImageClassification",
    build=_build_vit,
    names=_map_vit_names,
    defaults={
        **hf.VISION_DEFAULTS,
        "intermediate_size": 3072,
        "head_dim": hf.optional_count(),
        "layer_norm_eps": 1e-12,
        "qkv_bias": True,
        "pooler_output_size": hf.optional_count(),
        "pooler_act": "tanh",
    },
    required_values=hf.ONLY_BIDIRECTIONAL,
    ignored_keys=frozenset({"encoder_stride"}),
    memory_names=_map_vit_memory_names,
    describe=_describe_vit,
)
