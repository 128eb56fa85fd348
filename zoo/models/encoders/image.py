"""From images to logits or features: vision Transformers, on the blocks and the stack of decoders."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from zoo._checks import check_images, describe_argument, wrap_key
from zoo.layers import AbstractNorm, Dropout, TokenInfo
from zoo.layers.encoders.masked_images import MaskedImageEmbedding, MaskedImages
from zoo.layers.encoders.packed_embedding import PackedImageEmbedding
from zoo.layers.encoders.packed_images import PackedImages
from zoo.layers.encoders.patches import ImageEmbedding, PatchedImageEmbedding, PatchedImages
from zoo.layers.token_info import split_row_keys
from zoo.parallel import Module, buffer, gather, implementation_option
from zoo.parallel.activation import Edit
from zoo.parallel.collectives import sharded_axes
from zoo.parallel.remat import Remat
from zoo.parallel.tokens import replicate_tokens, shard_tokens
from zoo.shapes import HiddenStates, ResidualStream

from ..build import LayerFactories, build_stack
from ..decoder import EMBEDDING_DROPOUT_SITE, AbstractBlock, AbstractStack, Block, Hidden
from ..hf.spec import Origin
from ..loop import Loop
from ..torch_habits import explain_torch_habit, hash_for_jit
from .heads import AbstractEncoderHead, EncoderFeatures

Images = Float[Array, "batch channels height width"]
AnyImages = Images | PatchedImages | MaskedImages | PackedImages
AnyEmbedding = ImageEmbedding | PatchedImageEmbedding | MaskedImageEmbedding | PackedImageEmbedding


class ImageEncoder(Module):
    """A vision Transformer: head(norm(stack(embedding(images)))) (ViT, Dosovitskiy et al., arXiv:2010.11929).

    The head is a `ClassificationHead`, whose result is logits, or a `FeatureHead`, whose result
    is `EncoderFeatures`. Tokens of an image attend to each other in both directions.

    Images may have another size than the model was trained for: learned positions are then interpolated. A
    `PatchedImageEmbedding` reads `PatchedImages`, of several shapes in one batch; a `PackedImageEmbedding` reads
    `PackedImages`, several in one row, each of which attends to itself.
    """

    embedding: AnyEmbedding
    stack: AbstractStack
    norm: AbstractNorm
    head: AbstractEncoderHead
    dropout: Dropout
    embedding_norm: AbstractNorm | None = None

    edits: tuple[Edit, ...] = buffer(default=())
    """Edits of values of the forward pass (`zoo.patch`)."""
    origin: Origin | None = implementation_option(default=None)
    """The checkpoint that the model was loaded from, which `zoo.save` needs."""

    if not TYPE_CHECKING:  # for a type checker every name would be an attribute
        __getattr__ = explain_torch_habit

    def __hash__(self) -> int:
        return hash_for_jit(self)

    def __call__(
        self,
        images: AnyImages,
        *,
        masked: Bool[Array, "batch patches"] | None = None,
        key: Key[Array, ""] | Key[Array, "batch"] | None = None,
    ) -> Float[Array, "batch classes"] | EncoderFeatures:
        """Return the head's output for each image.

        - `images`: normalized pixels, as the checkpoint's image processor makes them.
        - `masked`: patches, row by row, to replace by the mask token of a model that has one.
        - `key`: PRNG key for dropout, one or one per row. No dropout without it.

        **Raises** `TypeError` for pixels that are not floating point, and for images of the other kind than the model
        reads; `ValueError` for other dims, another number of channels, an image smaller than a patch, and `masked`
        without a mask token.
        """
        kind = self.embedding.reads
        if kind is None:
            check_images(images)
        elif not isinstance(images, kind):
            raise TypeError(f"images: expected {kind.__name__}, got {describe_argument(images)}")
        hidden = self.hidden(images, self.token_info(images, key=key), masked)
        return self.read_head(hidden.x, images)

    def read_head(self, x: HiddenStates, images: AnyImages) -> Any:
        """Return the head's output for normalized hidden states of these images."""
        mask = None
        if isinstance(images, PatchedImages):
            mask = images.mask
        elif isinstance(images, PackedImages):
            mask = images.find_images() > 0
        return gather(self.head)(x, mask)

    def token_info(self, images: AnyImages, *, key: Key[Array, "..."] | None = None) -> TokenInfo:
        """Return the coordinates of the tokens of images, segment 0 for padding, and one PRNG key per row."""
        embedding: Any = gather(self.embedding)
        segments = None
        windows = None
        positions = None
        if isinstance(images, PatchedImages):
            segments = images.mask.astype(jnp.int32)
        elif isinstance(images, MaskedImages):
            positions = embedding.find_positions(images)
        elif isinstance(images, PackedImages):
            segments, windows = embedding.find_segments(images)
        return TokenInfo(
            positions=positions,
            segment_ids=segments,
            keys=split_row_keys(key, count_images(images)),
            coordinates=embedding.compute_coordinates(images),
            windows=windows,
        )

    def hidden(self, images: AnyImages, info: TokenInfo, masked: Bool[Array, "batch patches"] | None = None) -> Hidden:
        """Return the hidden states after the final norm, of `PackedImages` in the order of their patches.

        **Raises** `NotImplementedError` on a mesh with `context`, which shards only the tokens of texts.
        """
        hidden = self.embed(images, info, masked)
        if axes := sharded_axes(hidden.x, "seq"):
            raise NotImplementedError(
                f"the tokens of an image are not sharded over {' x '.join(axes)}, as tokens of a text are: leave "
                f"{' and '.join(axes)} at 1, and give the devices to data, fsdp or tensor"
            )
        hidden, _ = self.stack(hidden, info)
        hidden = hidden.drop_routing().normalize(gather(self.norm))
        return jax.tree.map(partial(self._restore, images), hidden)

    def _restore(self, images: Any, x: ResidualStream) -> HiddenStates:
        """Return all tokens, in the order of the patches of images."""
        x = replicate_tokens(x)
        if isinstance(self.embedding, PackedImageEmbedding):
            return self.embedding.restore(x, images)
        return x

    def embed(self, images: AnyImages, info: TokenInfo, masked: Bool[Array, "batch patches"] | None = None) -> Hidden:
        """Return the input of the first layer."""
        x = shard_tokens(gather(self.embedding)(images, masked))
        if self.embedding_norm is not None:
            x = gather(self.embedding_norm)(x)
        return Hidden(self.dropout(x, info, site=EMBEDDING_DROPOUT_SITE))


def count_images(images: AnyImages) -> int:
    """Return the number of rows of a batch of images: of images, unless they are packed."""
    if isinstance(images, PatchedImages | MaskedImages | PackedImages):
        return images.pixels.shape[0]
    return images.shape[0]


def build_image_encoder(
    *,
    embedding: Callable[..., AnyEmbedding],
    layers: Sequence[LayerFactories],
    norm: Callable[[], AbstractNorm],
    head: Callable[..., AbstractEncoderHead],
    block: Callable[..., AbstractBlock] | Sequence[Callable[..., AbstractBlock]] = Block,
    embedding_norm: Callable[[], AbstractNorm] | None = None,
    final_norm: Callable[[], AbstractNorm] | None = None,
    dropout: float = 0.0,
    remat: Remat = "none",
    loop: Loop = "auto",
    key: Key[Array, ""],
) -> ImageEncoder:
    """Build a vision Transformer from factories of its parts, as `zoo.models.build_decoder` builds a decoder.

    `embedding` and `head` are called with `key=`; `norm` makes the norms before each sublayer, and the final one unless
    `final_norm` does; `embedding_norm` one before the first layer.
    """
    embedding_key, stack_key, head_key = jax.random.split(wrap_key(key), 3)
    return ImageEncoder(
        embedding=embedding(key=embedding_key),
        stack=build_stack(layers, norm, block=block, dropout=dropout, remat=remat, loop=loop, key=stack_key),
        norm=norm() if final_norm is None else final_norm(),
        head=head(key=head_key),
        dropout=Dropout(dropout),
        embedding_norm=None if embedding_norm is None else embedding_norm(),
    )
