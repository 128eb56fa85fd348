"""Factories of vision Transformers from the values of a config: embeddings, heads by architecture, and the encoder."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Key

from zoo.layers import AbstractNorm
from zoo.layers.encoders.patches import ImageEmbedding

from ..blocks import LayerScaleBlock, UnreadBlock
from ..build import LayerFactories
from ..decoder import Block
from ..encoders.heads import ClassificationHead, take_first_token
from ..encoders.image import ImageEncoder, build_image_encoder
from .encoder_heads import HEAD_DEFAULTS, HeadFactory, count_classes
from .errors import ConfigError
from .kinds import SIZE, Default
from .spec import Config

VISION_DEFAULTS: dict[str, Any] = {
    **HEAD_DEFAULTS,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "image_size": Default(224, SIZE),
    "patch_size": Default(16, SIZE),
    "num_channels": 3,
}
"""Defaults that the classes of vision Transformers have in common."""

ONLY_BIDIRECTIONAL = {"is_causal": (None, False)}
"""Required values of encoders."""

BACKBONE_KEYS = frozenset({"apply_layernorm", "reshape_hidden_states", "out_features", "out_indices", "stage_names"})
"""Keys of backbones, which return the feature maps of several layers."""


def read_size(config: Config, name: str) -> tuple[int, int]:
    """Return a size, height and width, that the config may give as one number."""
    size = config[name]
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def make_image_embedding_factory(
    config: Config, *, positions: bool = True, **options: Any
) -> Callable[..., ImageEmbedding]:
    """Return a factory of `ImageEmbedding`. **Raises** `ConfigError` for images smaller than a patch."""
    patch = read_size(config, "patch_size")
    grid = read_grid(config) if positions else None
    return partial(
        ImageEmbedding, config["num_channels"], config["hidden_size"], patch_size=patch, grid=grid, **options
    )


def read_grid(config: Config) -> tuple[int, int]:
    """Return rows and columns of patches. **Raises** `ConfigError` for images smaller than a patch."""
    image = read_size(config, "image_size")
    patch = read_size(config, "patch_size")
    grid = image[0] // patch[0], image[1] // patch[1]
    if not all(grid):
        raise ConfigError(f"image_size = {config['image_size']} is smaller than patch_size = {config['patch_size']}")
    return grid


def make_classification_head_factory(
    config: Config, *, pool: Callable = take_first_token, parts: int = 1
) -> Callable[..., ClassificationHead]:
    """Return a factory of a `ClassificationHead` over the classes of `id2label`; `pool` joins `parts` vectors of
    `hidden_size`.

    **Raises** `ConfigError` if `num_labels` is another number.
    """
    return partial(ClassificationHead, parts * config["hidden_size"], count_classes(config), pool=pool)


def make_layer_scale_block(config: Config) -> Callable[..., LayerScaleBlock]:
    """Return a factory of `LayerScaleBlock`, whose scales start at 1."""
    ones = jnp.ones(config["hidden_size"], jnp.float32)
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
    """Call `build_image_encoder` with `num_hidden_layers` equal layers, of which the last `unread_layers` are only
    held."""
    count = config["num_hidden_layers"]
    unread = config.get("unread_layers", 0)
    if not 0 <= unread <= count:
        raise ConfigError(f"num_hidden_layers = {count}, and the last {unread} should not be read")
    layers: Sequence[LayerFactories] = [layer] * count
    if unread:
        options["block"] = [options.get("block", Block)] * (count - unread) + [UnreadBlock] * unread
    return build_image_encoder(embedding=embedding, layers=layers, norm=norm, head=head, key=key, **options)
