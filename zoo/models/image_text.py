"""From texts with images in them to logits: a tower that reads images, a projector, and a decoder of texts."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from zoo._checks import check_images, check_tokens, describe_argument, is_host_readable
from zoo.layers import TokenInfo
from zoo.layers.encoders.masked_images import MaskedImages
from zoo.layers.encoders.packed_images import PackedImages
from zoo.layers.encoders.projectors import AbstractProjector
from zoo.layers.token_info import batch_token_info, token_info
from zoo.parallel import Module, gather, implementation_option
from zoo.parallel.collectives import current_mesh
from zoo.parallel.fields import wrapped
from zoo.parallel.tokens import shard_tokens
from zoo.shapes import PaddingMask, Positions, ResidualStream, SegmentIds, Tokens

from .decoder import AbstractBlock, AbstractLayerInputs, Block, Decoder, Hidden, find_checkable_vocab
from .encoders.deepstack import DeepstackHidden
from .hf.spec import Origin
from .image_places import AbstractPlaces, CausalPlaces, PrefixSpan, Spans
from .torch_habits import explain_torch_habit, hash_for_jit

_TOWER = 2**21
"""Number that is folded into the PRNG keys of the tower, so that its layers draw other dropout masks."""
_BATCH_KEYS = ("images", "spans")
SeenImages = Float[Array, "batch images channels height width"] | MaskedImages | PackedImages
Features = Float[Array, "batch features embed"]


class ImageText(Module):
    """A language model that sees: features of images stand in a text's places for them (LLaVA, Liu et al.,
    arXiv:2304.08485).

        x[t] = features[n]     where tokens[t] is the n-th of the row's image tokens
        x[t] = E[tokens[t]]    elsewhere

        logits = model(tokens, images)
        decoder = model.read(images)              # a Decoder of texts with these images
        zoo.generate(model, tokens, images=images, max_new_tokens=32)

    Images are rows first, as texts are: a row has its images in the order of their places, and zeros at its end if it
    has fewer than others. Without images it is the language model, `model.decoder`; a prefix (`PrefixSpan`) is still
    read in both directions.
    """

    tower: Any
    """An `ImageEncoder`."""
    projector: AbstractProjector
    decoder: Decoder

    image_tokens: tuple[int, ...] = eqx.field(static=True)
    """Token ids that stand for features of an image."""
    places: AbstractPlaces = eqx.field(static=True, default=CausalPlaces())
    """Positions of images, and the tokens that see each other."""
    stand_in: int = eqx.field(static=True, default=0)
    """Token id that layers with embeddings of their own read in the places of images."""
    origin: Origin | None = implementation_option(default=None)
    """The checkpoint that the model was loaded from, which `zoo.save` needs."""

    if not TYPE_CHECKING:  # for a type checker every name would be an attribute

        def __getattr__(self, name: str) -> Any:
            if name in Decoder.__dataclass_fields__:
                raise AttributeError(
                    f"'ImageText' object has no attribute {name!r}: model.read(images) is a Decoder of texts with "
                    "these images, and takes the TokenInfo of model.place_images; model.decoder is one of texts only",
                    name=name,
                    obj=self,
                )
            explain_torch_habit(self, name)

    def __hash__(self) -> int:
        return hash_for_jit(self)

    def __check_init__(self):
        if self.places.reads_ahead:
            self._check_lookahead()

    def _check_lookahead(self) -> None:
        if names := _list_blind_mixers(self.decoder):
            raise NotImplementedError(f"tokens of images attend to later ones, and {names[0]} does not look ahead")

    def __call__(
        self,
        tokens: Tokens,
        images: SeenImages | None = None,
        *,
        mask: PaddingMask | None = None,
        segment_ids: SegmentIds | None = None,
        positions: Positions | None = None,
        spans: Spans | None = None,
        key: Key[Array, ""] | Key[Array, "batch"] | None = None,
    ) -> Float[Array, "batch seq vocab"]:
        """Return the next-token logits at every position.

        - `tokens`: texts, with one of `image_tokens` for each feature of an image.
        - `images`: pixels as `zoo.images` makes them: "batch images channels height width", `MaskedImages`, or
          `PackedImages`.
        - `spans`: ids of spans of tokens that attend to each other in both directions, 0 for causal ones. By default
          as `places` says.

        Other arguments are as for `zoo.models.Decoder`.

        **Raises** `ValueError` and `TypeError` as `Decoder` does, and for images that do not match the tokens, in
        number or in size; `NotImplementedError` for images on a mesh with `context`.
        """
        check_tokens(tokens, find_checkable_vocab(self.decoder))
        self.check_images(tokens, images)
        info = token_info(tokens, mask=mask, segment_ids=segment_ids, positions=positions, key=key)
        info = self.place_images(tokens, images, info, spans)
        hidden, _ = self.read(images, key=info.keys).hidden(tokens, info)
        return self.decoder.logits(hidden.x)

    def read(self, images: SeenImages | None, *, key: Key[Array, "batch"] | None = None) -> Decoder:
        """Return the decoder of texts with these images. It takes the `TokenInfo` of `place_images`."""
        if images is None:
            return self.decoder
        features, deep = self.embed_images(images, key=key)
        inputs = ImageInputs(features, deep, self.decoder.layer_inputs, self.image_tokens, self.stand_in)
        return dataclasses.replace(self.decoder, layer_inputs=inputs)

    def embed_images(
        self, images: SeenImages, *, key: Key[Array, "batch"] | None = None
    ) -> tuple[Features, tuple[Features, ...]]:
        """Return the features that stand in the texts, one image of a row after the other; and of layers of the tower
        that are kept, for as many layers of the decoder (DeepStack)."""
        projector = gather(self.projector)
        if isinstance(images, PackedImages):
            hidden = self._run_tower(images, key)
            deep = projector.merge_kept(hidden.kept, images) if isinstance(hidden, DeepstackHidden) else ()
            return projector(hidden.x, images), deep
        pixels = images.pixels if isinstance(images, MaskedImages) else images
        rows, count = pixels.shape[:2]
        keys = None if key is None else jnp.repeat(key, count, axis=0)
        hidden = self._run_tower(_split_images(images), keys)
        embedding = self.tower.embedding
        x = hidden.x[:, embedding.num_other :]
        features = projector(x, embedding.patches.count_patches(pixels[0]))
        return features.reshape(rows, -1, features.shape[-1]), ()

    def _run_tower(self, images: Any, key: Key[Array, "rows"] | None) -> Hidden:
        return self.tower.hidden(images, self.tower.token_info(images, key=key).fold_keys(_TOWER))

    def place_images(
        self,
        tokens: Tokens,
        images: SeenImages | None,
        info: TokenInfo,
        spans: Spans | None = None,
    ) -> TokenInfo:
        """Return `info` with the places of images: positions on several axes, and tokens that see each other.

        **Raises** `NotImplementedError` for `spans` of a decoder with mixers that do not look ahead.
        """
        if spans is not None:
            self._check_lookahead()
        return self.places.describe(tokens, find_image_tokens(tokens, self.image_tokens), images, info, spans)

    def bind(
        self, batch: Mapping[str, Any], key: Key[Array, "batch"] | None = None
    ) -> tuple[Decoder, dict[str, Array]]:
        """Return the decoder of the texts of a batch, and the batch without its images: what `zoo.cross_entropy` calls.

        - `batch`: `images`, if there are any, and optionally `spans`, besides the keys of a decoder.

        **Raises** `ValueError` for images that do not match the tokens, and as `require_spans`.
        """
        require_spans(self, batch.get("spans"))
        rest = {name: x for name, x in batch.items() if name not in _BATCH_KEYS}
        images = batch.get("images")
        self.check_images(rest["tokens"], images)
        info = self.place_images(rest["tokens"], images, batch_token_info(rest, key), batch.get("spans"))
        places = {"lookahead": info.lookahead, "coordinates": info.coordinates}
        rest |= {name: x for name, x in places.items() if x is not None}
        return self.read(images, key=key), rest

    def check_images(self, tokens: Any, images: Any) -> None:
        """**Raises** `TypeError` for another kind of images than the tower reads, and `ValueError` for another
        number of rows than tokens have, and, where values can be read, for tokens that do not match the images."""
        kind = self.tower.embedding.reads
        if images is not None and not (getattr(images, "ndim", 0) == 5 if kind is None else isinstance(images, kind)):
            expected = '"batch images channels height width"' if kind is None else kind.__name__
            raise TypeError(f"images: expected {expected}, got {describe_argument(images)}")
        if images is not None and kind is None:
            check_images(jax.ShapeDtypeStruct(images.shape[1:], images.dtype))
        rows = 0 if images is None else jax.tree.leaves(images)[0].shape[0]
        if images is not None and rows != len(tokens):
            raise ValueError(f"images: expected a row for each of {len(tokens)} texts, got {rows}")
        if current_mesh() is not None or not all(map(is_host_readable, (tokens, *jax.tree.leaves(images)))):
            return
        found = np.isin(np.asarray(tokens), self.image_tokens).sum(1)
        expected = np.zeros(len(found), int) if images is None else self.count_features(images)
        if len(wrong := np.flatnonzero(found != expected)):
            row = int(wrong[0])
            raise ValueError(
                f"row {row} has {found[row]} image tokens ({', '.join(map(str, self.image_tokens))}), and its images "
                f"have {expected[row]} features: write one token for each, as the checkpoint's processor does"
            )

    def count_features(self, images: Any) -> np.ndarray:
        """Return the number of features of the images of each row. Images of zeros pad a row.

        **Raises** `ValueError` for packed images whose grids have more patches than there are.
        """
        if isinstance(images, PackedImages):
            patches = np.asarray(images.grids).prod(-1).sum(1)
            if patches.max() > images.pixels.shape[1]:
                row = int(patches.argmax())
                held = images.pixels.shape[1]
                raise ValueError(
                    f"row {row} has grids of {patches[row]} patches, and pixels of {held}: give all of them"
                )
            return self.projector.count_packed(np.asarray(images.grids)).sum(1)
        pixels = images.pixels if isinstance(images, MaskedImages) else images
        grid = self.tower.embedding.patches.count_patches(pixels[0])
        is_real = np.asarray(pixels).any((2, 3, 4))
        return is_real.sum(1) * self.projector.count_features(grid)


def _split_images(images: Any) -> Any:
    """Return each image of a batch as a row of its own."""
    if isinstance(images, MaskedImages):
        return jax.tree.map(lambda x: x.reshape(-1, 1, *x.shape[2:]), images)
    return images.reshape(-1, *images.shape[2:])


class SeenHidden(Hidden):
    """Hidden states with features of images for the first layers."""

    constant_fields = ("deep",)

    deep: tuple[ResidualStream, ...] | None = None
    """One for each of the first layers, 0 for tokens of text."""


class SeeingBlock(AbstractBlock):
    """A layer, and then x + features of images of an inner layer of their tower (DeepStack, Meng et al.,
    arXiv:2406.04334; Qwen3-VL, arXiv:2511.21631, section 2). Without images only the layer."""

    block: AbstractBlock = wrapped()

    number: int = eqx.field(static=True)
    """Number of the features."""

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        return self.block.init_state(batch, length, dtype)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        hidden, state = self.block(hidden, info, state)
        if not isinstance(hidden, SeenHidden) or not hidden.deep:
            return hidden, state
        return dataclasses.replace(hidden, x=hidden.x + hidden.deep[self.number]), state


def make_seeing_block(number: int, **parts: Any) -> SeeingBlock:
    """Make a pre-norm layer that reads features `number`. A factory, for `functools.partial`."""
    return SeeingBlock(Block(**parts), number)


class ImageInputs(AbstractLayerInputs):
    """Features of images in the places of image tokens, before any other inputs of layers."""

    features: Features
    deep: tuple[Features, ...]
    inner: AbstractLayerInputs | None

    image_tokens: tuple[int, ...] = eqx.field(static=True)
    stand_in: int = eqx.field(static=True)

    def __call__(self, tokens: Tokens, x: ResidualStream) -> Hidden:
        """Return the input of the first layer. In a row with more image tokens than features the rest are NaN."""
        is_image = find_image_tokens(tokens, self.image_tokens)
        number = shard_tokens(jnp.cumsum(is_image, axis=1) - is_image)
        here = shard_tokens(is_image)[..., None]
        take = lambda features: _take_features(features, number).astype(x.dtype)
        x = jnp.where(here, take(self.features), x)
        if self.inner is not None:
            return self.inner(jnp.where(is_image, self.stand_in, tokens), x)
        return SeenHidden(x, deep=tuple(jnp.where(here, take(features), 0) for features in self.deep))


def _take_features(
    features: Float[Array, "batch features embed"], number: Int[Array, "batch tokens"]
) -> Float[Array, "batch tokens embed"]:
    """Return the feature of each number, NaN for one that is too large."""
    return jnp.take_along_axis(features, number[..., None], axis=1, mode="fill", fill_value=jnp.nan)


def check_texts(model: Any, tokens: Any, images: Any) -> None:
    """Check texts for a model of tokens, which reads images with them if it is an `ImageText`.

    **Raises** `TypeError` and `ValueError` as the model does, and `TypeError` for images of a model without a tower.
    """
    if isinstance(model, ImageText):
        check_tokens(tokens, find_checkable_vocab(model.decoder))
        model.check_images(tokens, images)
        return
    refuse_images(model, images)
    check_tokens(tokens, find_checkable_vocab(model))


def refuse_images(model: Any, images: Any) -> None:
    """**Raises** `TypeError` for images of a model without a tower."""
    if images is not None:
        raise TypeError(f"images: {type(model).__name__} reads texts only, and zoo.models.ImageText reads images")


def read_images(
    model: Any, tokens: Tokens, images: SeenImages | None, info: TokenInfo, spans: Spans | None = None
) -> tuple[Any, TokenInfo]:
    """Return the decoder of texts with these images, and `info` with their places. Another model than an `ImageText` is
    returned as it is."""
    if not isinstance(model, ImageText):
        return model, info
    return model.read(images, key=info.keys), model.place_images(tokens, images, info, spans)


def reads_prefix(model: Any) -> bool:
    """Return True for a model that reads a prefix in both directions (PaliGemma), and needs spans for a loss."""
    return isinstance(model, ImageText) and isinstance(model.places, PrefixSpan)


def require_spans(model: Any, spans: Any) -> None:
    """**Raises** `ValueError` for a model that reads a prefix in both directions, without spans, where each token is
    predicted from those before it."""
    if reads_prefix(model) and spans is None:
        raise ValueError(
            "without spans every token is of the prefix, and sees the one that is to be predicted: pass spans"
        )


def find_image_tokens(tokens: Tokens, image_tokens: tuple[int, ...]) -> Bool[Array, "batch seq"]:
    """Return True for tokens that stand for features of an image."""
    return jnp.isin(tokens, jnp.asarray(image_tokens))


def _list_blind_mixers(decoder: Decoder) -> list[str]:
    """Return the classes of mixers that attend to no later token."""
    is_mixer = lambda x: hasattr(x, "init_state") and hasattr(x, "value_names")
    mixers = [x for x in jax.tree.leaves(decoder.stack, is_leaf=is_mixer) if is_mixer(x)]
    return [type(x).__name__ for x in mixers if not x.looks_ahead]
