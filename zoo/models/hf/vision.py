"""Factories of vision Transformers from the values of a config: embeddings, heads by architecture, and the encoder."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Key

from zoo.layers import AbstractNorm, AbstractPooler, ImageEmbedding
from zoo.layers.encoders.bidirectional_attention import BidirectionalAttention

from ..blocks import LayerScaleBlock
from ..build import LayerFactories
from ..encoders.heads import ClassificationHead, FeatureHead, take_first_token
from ..encoders.image import ImageEncoder, build_image_encoder
from .builders import compute_out_scale, read_head_sizes
from .config import ConfigError
from .spec import Config

LABEL_KEYS = ("id2label", "num_labels")
"""Keys of classifiers, which families of features alone do not have."""

VISION_DEFAULTS: dict[str, Any] = {
    "architectures": None,
    "id2label": None,
    "num_labels": None,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
}
"""Defaults that the classes of vision Transformers have in common."""

ONLY_BIDIRECTIONAL = {"is_causal": (None, False)}
"""Required values of encoders."""

BACKBONE_KEYS = frozenset({"apply_layernorm", "reshape_hidden_states", "out_features", "out_indices", "stage_names"})
"""Keys of backbones, which return the feature maps of several layers."""

HeadFactory = Callable[..., Any]


def read_size(config: Config, name: str) -> tuple[int, int]:
    """Return a size, height and width, that the config may give as one number."""
    size = config[name]
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def make_image_embedding_factory(
    config: Config, *, positions: bool = True, **options: Any
) -> Callable[..., ImageEmbedding]:
    """Return a factory of `ImageEmbedding`. **Raises** `ConfigError` for images smaller than a patch."""
    patch, grid = read_size(config, "patch_size"), read_grid(config) if positions else None
    return partial(
        ImageEmbedding, config["num_channels"], config["hidden_size"], patch_size=patch, grid=grid, **options
    )


def read_grid(config: Config) -> tuple[int, int]:
    """Return rows and columns of patches. **Raises** `ConfigError` for images smaller than a patch."""
    image, patch = read_size(config, "image_size"), read_size(config, "patch_size")
    grid = image[0] // patch[0], image[1] // patch[1]
    if not all(grid):
        raise ConfigError(f"image_size = {config['image_size']} is smaller than patch_size = {config['patch_size']}")
    return grid


def make_bidirectional_attention_factory(config: Config, **options: Any) -> Callable[..., BidirectionalAttention]:
    """Return a factory of `BidirectionalAttention` with these options, and sizes from the config."""
    heads, kv_heads, head_dim = read_head_sizes(config)
    sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "out_scale": compute_out_scale(config)}
    return partial(BidirectionalAttention, config["hidden_size"], heads, **sizes, **options)


def select_head(config: Config, heads: Mapping[str, HeadFactory]) -> HeadFactory:
    """Return the head of the config's architecture; the first of `heads` if it names none.

    **Raises** `ConfigError` for an architecture with another head.
    """
    names = config["architectures"] or list(heads)[:1]
    known = [name for name in names if name in heads]
    if not known:
        raise ConfigError(f"architectures = {names}, and the heads here are those of {' and '.join(heads)}")
    return heads[known[0]]


def make_classification_head_factory(
    config: Config, *, pool: Callable = take_first_token, parts: int = 1
) -> Callable[..., ClassificationHead]:
    """Return a factory of a `ClassificationHead` over the classes of `id2label`; `pool` joins `parts` vectors of
    `hidden_size`.

    **Raises** `ConfigError` if `num_labels` is another number.
    """
    return partial(ClassificationHead, parts * config["hidden_size"], count_classes(config), pool=pool)


def count_classes(config: Config) -> int:
    """Return the number of classes that `id2label` names, or `num_labels`. **Raises** `ConfigError` if they differ."""
    labels, count = config["id2label"], config["num_labels"]
    if labels is not None and count not in (None, len(labels)):
        raise ConfigError(f"num_labels = {count}, and id2label has {len(labels)} labels")
    return len(labels) if labels is not None else count or 2  # transformers' default


def make_feature_head_factory(pooler: Callable[..., AbstractPooler] | None) -> Callable[..., FeatureHead]:
    """Return a factory of a `FeatureHead`, given that of its pooler, called with `key=`, if it has one."""
    return lambda key: FeatureHead(None if pooler is None else pooler(key=key))


def make_layer_scale_block(config: Config) -> Callable[..., LayerScaleBlock]:
    """Return a factory of `LayerScaleBlock`, whose scales start at 1."""
    ones = jnp.ones(config["hidden_size"])
    return lambda **parts: LayerScaleBlock(mixer_scale=ones, ffn_scale=ones, **parts)


def build_config_image_encoder(
    config: Config,
    layer: LayerFactories,
    norm: Callable[[], AbstractNorm],
    head: HeadFactory,
    embedding: Callable[..., ImageEmbedding],
    *,
    key: Key[Array, ""],
    **options: Any,
) -> ImageEncoder:
    """Call `build_image_encoder` with `num_hidden_layers` equal layers."""
    layers: Sequence[LayerFactories] = [layer] * config["num_hidden_layers"]
    return build_image_encoder(embedding=embedding, layers=layers, norm=norm, head=head, key=key, **options)
