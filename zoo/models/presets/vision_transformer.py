"""Vision Transformer for image classification, initialized from scratch."""

from collections.abc import Callable
from functools import partial

from jaxtyping import Array, Key

from zoo._keywords import check_keywords
from zoo.layers import MLP, LayerNorm
from zoo.layers.encoders.bidirectional_attention import BidirectionalAttention
from zoo.layers.encoders.patches import ImageEmbedding
from zoo.ops.activations import gelu
from zoo.parallel.remat import Remat

from ..encoders.heads import ClassificationHead
from ..encoders.image import ImageEncoder, build_image_encoder
from ..loop import Loop


@check_keywords
def VisionTransformer(
    *,
    image_size: int | tuple[int, int],
    patch_size: int | tuple[int, int],
    channels: int = 3,
    classes: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    dropout: float = 0.0,
    remat: Remat = "none",
    loop: Loop = "auto",
    implementation: str | Callable = "auto",
    key: Key[Array, ""],
) -> ImageEncoder:
    """Build a ViT (Dosovitskiy et al., arXiv:2010.11929): class token, learned positions, pre-norm layers with biases.

    - `image_size`, `patch_size`: in pixels; two numbers are height and width. Images of another size are embedded too,
      with interpolated positions.
    - `channels` of a pixel, `classes` of images.
    - `embed`, `layers`, `heads`, `mlp`, `dropout`, `remat`, `loop`, `implementation`: as for `Transformer`.

    Positions and the class token start with standard deviation 1/2, patches of normalized pixels with 1, so that places
    are told apart from the first step: after 600 steps on 1,413 digits, 99.0% of those held out were right, and 95.3%
    with the usual 0.02 (recipes/vit.py).

    **Raises** `ValueError` for no layers, and for an image smaller than a patch.
    """
    image = (image_size, image_size) if isinstance(image_size, int) else image_size
    patch = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
    grid = image[0] // patch[0], image[1] // patch[1]
    if layers < 1:
        raise ValueError(f"a VisionTransformer has at least 1 layer, not {layers}")
    if not all(grid):
        raise ValueError(f"an image of {image[0]} x {image[1]} pixels has no patch of {patch[0]} x {patch[1]}")
    out_scale = (2 * layers) ** -0.5
    options = {"bias": True, "out_bias": True, "out_scale": out_scale, "implementation": implementation}
    mixer = partial(BidirectionalAttention, embed, heads, **options)
    ffn = partial(MLP, embed, mlp, activation=gelu, out_scale=out_scale)
    return build_image_encoder(
        embedding=partial(ImageEmbedding, channels, embed, patch_size=patch, grid=grid, scale=0.5),
        layers=[(mixer, ffn)] * layers,
        norm=partial(LayerNorm, embed, epsilon=1e-6),
        head=partial(ClassificationHead, embed, classes),
        dropout=dropout,
        remat=remat,
        loop=loop,
        key=key,
    )
