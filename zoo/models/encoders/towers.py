"""Two towers, an encoder of texts and one of images, trained to agree on pairs: CLIP, SigLIP and their kin."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.layers import AbstractLinear, TokenInfo
from zoo.layers.encoders.patches import PatchedImages
from zoo.layers.token_info import split_row_keys
from zoo.parallel import Module, all_gather, full_precision, gather, implementation_option, num_shards
from zoo.parallel.collectives import current_mesh, shard_offset
from zoo.parallel.pipeline import active_pipelining

from ..hf.spec import Origin
from ..loss import token_losses
from ..torch_habits import explain_torch_habit, hash_for_jit
from .heads import EncoderFeatures
from .image import ImageEncoder, count_images
from .text import Encoder

_PairedImages = Float[Array, "images channels height width"]
ContrastiveKind = Literal["softmax", "sigmoid"]
_TOWER_FIELDS = {*Encoder.__dataclass_fields__, *ImageEncoder.__dataclass_fields__}
_KEYS = ("tokens", "images", "mask", "token_types")


class Similarity(Module):
    """Logits of pairs of embeddings of norm 1: exp(log_scale) image · text + bias. The bias is optional."""

    log_scale: Float[Array, ""] = full_precision()
    bias: Float[Array, ""] | None = full_precision()

    def __call__(
        self, images: Float[Array, "images features"], texts: Float[Array, "texts features"]
    ) -> Float[Array, "images texts"]:
        logits = jnp.exp(self.log_scale) * jnp.einsum("if,tf->it", images, texts, precision="highest")
        if self.bias is None:
            return logits
        return logits + self.bias


class TwoTowers(Module):
    """An encoder of texts and one of images with embeddings in one space (CLIP, Radford et al., arXiv:2103.00020;
    SigLIP, Zhai et al., arXiv:2303.15343).

        embedding = P pool(encoder(x)) / |P pool(encoder(x))|
        logit of an image and a text = exp(log_scale) image · text + bias

    The head of each encoder is a `FeatureHead` with a pooler. Projections P and bias are optional. Each tower is a
    model by itself: `zoo.hidden_states(model.text, tokens)`, `model.image(images)`.
    """

    text: Encoder
    image: ImageEncoder
    text_projection: AbstractLinear | None
    image_projection: AbstractLinear | None
    similarity: Similarity

    origin: Origin | None = implementation_option(default=None)
    """The checkpoint that the model was loaded from, which `zoo.save` needs."""

    if not TYPE_CHECKING:  # for a type checker every name would be an attribute

        def __getattr__(self, name: str) -> Any:
            if hasattr(Encoder, name) or hasattr(ImageEncoder, name) or name in _TOWER_FIELDS:
                raise AttributeError(
                    f"'TwoTowers' object has no attribute {name!r}: pass a tower, model.text or model.image, which is "
                    "a model by itself",
                    name=name,
                    obj=self,
                )
            explain_torch_habit(self, name)

    def __hash__(self) -> int:
        return hash_for_jit(self)

    def __call__(
        self,
        tokens: Int[Array, "texts seq"],
        images: _PairedImages | PatchedImages,
        *,
        mask: Bool[Array, "texts seq"] | None = None,
        token_types: Int[Array, "texts seq"] | None = None,
        key: Key[Array, "..."] | None = None,
    ) -> Float[Array, "images _"]:
        """Return the logit of each image with each text, in float32: `logits_per_image` of transformers. On a mesh, the
        images of this device with the texts of all.

        Arguments are as for `Encoder` and `ImageEncoder`. There may be other numbers of texts than of images, unless
        dropout is given one `key` per row.
        """
        texts = self.embed_texts(tokens, mask=mask, token_types=token_types, key=key)
        images = self.embed_images(images, key=key)
        return gather(self.similarity)(images, all_gather(texts, "batch", axis=0))

    def embed_texts(
        self,
        tokens: Int[Array, "texts seq"],
        *,
        mask: Bool[Array, "texts seq"] | None = None,
        token_types: Int[Array, "texts seq"] | None = None,
        key: Key[Array, "..."] | None = None,
    ) -> Float[Array, "texts features"]:
        """Return the embedding of each text, in float32 and of norm 1."""
        keys = _fold_keys(key, tokens, 0)
        return _normalize(self.text(tokens, mask=mask, token_types=token_types, key=keys), self.text_projection)

    def embed_images(
        self, images: _PairedImages | PatchedImages, *, key: Key[Array, "..."] | None = None
    ) -> Float[Array, "images features"]:
        """Return the embedding of each image, in float32 and of norm 1."""
        keys = _fold_keys(key, images, 1)
        return _normalize(self.image(images, key=keys), self.image_projection)


def _fold_keys(key: Key[Array, "..."] | None, inputs: Any, tower: int) -> Key[Array, "rows"] | None:
    """Return one PRNG key per row for one of the towers."""
    if key is None:
        return None
    return TokenInfo(keys=split_row_keys(key, count_images(inputs))).fold_keys(tower).keys


def _normalize(features: Any, projection: AbstractLinear | None) -> Float[Array, "rows features"]:
    assert isinstance(features, EncoderFeatures) and features.pooler_output is not None  # a family's towers are pooled
    x = features.pooler_output
    if projection is not None:
        x = gather(projection)(x)
    x = x.astype(jnp.float32)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def contrastive_loss(
    model: TwoTowers,
    batch: Mapping[str, Any],
    *,
    key: Key[Array, "batch"] | None = None,
    kind: ContrastiveKind | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the loss of pairs of images and texts, summed over the images, and their number. The other texts of the
    batch, on all devices of a mesh, are those that an image does not belong to.

    - `batch`: `images`, and the text of each as `tokens`; optionally a padding `mask` and `token_types`.
    - `kind`: by default "sigmoid" for a model with a bias, else "softmax".

    | kind | of image i, with logits l_ij for B texts |
    |---|---|
    | `softmax` | (log sum_j exp l_ij + log sum_j exp l_ji) / 2 - l_ii (CLIP, arXiv:2103.00020, figure 3) |
    | `sigmoid` | - log sigmoid(l_ii) - sum over j other than i of log sigmoid(-l_ij) (SigLIP, arXiv:2303.15343) |

    On a mesh the embeddings are all-gathered once, and each device compares its own rows. **Raises** `ValueError` for
    micro-batches, each of which would be compared only with itself; for tokens and images that are not as many; for one
    pair in all, which has nothing to tell apart; and for a batch with a key that is missing, or that nothing reads.
    `TypeError` for a model of one tower.
    """
    if not isinstance(model, TwoTowers):
        raise TypeError(f"a contrastive loss compares the embeddings of TwoTowers, not of {type(model).__name__}")
    if kind is None:
        kind = "softmax" if model.similarity.bias is None else "sigmoid"
    if kind not in ("softmax", "sigmoid"):
        raise ValueError(f"kind={kind!r}: expected softmax or sigmoid")
    _check_pairs(batch)
    _refuse_microbatches()
    inputs = {name: batch[name] for name in ("mask", "token_types") if name in batch}
    texts = model.embed_texts(batch["tokens"], **inputs, key=key)
    images = model.embed_images(batch["images"], key=key)
    rows = texts.shape[0]
    if rows * num_shards(texts, "batch") < 2:
        raise ValueError("the batch has one pair, and nothing to tell its image and text apart from: take more rows")
    own = shard_offset(texts, "batch", rows) + jnp.arange(rows)
    similarity = gather(model.similarity)
    if kind == "sigmoid":
        logits = similarity(images, all_gather(texts, "batch", axis=0))
        is_pair = own[:, None] == jnp.arange(logits.shape[1])
        total = -jax.nn.log_sigmoid(jnp.where(is_pair, logits, -logits)).sum()
    else:
        both = all_gather(jnp.concatenate([texts, images], axis=1), "batch", axis=0)
        all_texts, all_images = jnp.split(both, 2, axis=1)
        per_image = token_losses(similarity(images, all_texts), own)
        per_text = token_losses(similarity(all_images, texts).T, own)
        total = (per_image + per_text).sum() / 2
    return total, jnp.float32(rows)


def _check_pairs(batch: Mapping[str, Any]) -> None:
    """**Raises** `ValueError` for a batch that is not pairs of images and texts."""
    if missing := [name for name in ("tokens", "images") if name not in batch]:
        raise ValueError(f"the batch has no {' and no '.join(missing)}, only {', '.join(batch) or 'nothing'}")
    if unread := [name for name in batch if name not in _KEYS]:
        raise ValueError(f"the batch has {unread[0]}, which nothing reads: take it out")
    texts = batch["tokens"].shape[0]
    images = count_images(batch["images"])
    if texts != images:
        raise ValueError(f"the batch has {texts} texts and {images} images: expected the text of each image")


def _refuse_microbatches() -> None:
    mesh = current_mesh()
    count = active_pipelining.value.microbatches
    if mesh is not None and mesh.shape["pipe"] == 1 and count not in (None, 1):
        raise ValueError(
            f"microbatches={count}: each would be compared with itself and not with the whole batch, which is another "
            "loss: leave them out, and take remat or more devices to save memory"
        )
