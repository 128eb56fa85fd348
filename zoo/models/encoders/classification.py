"""Cross-entropy over classes: of images, of texts, or of tokens; of tokens that were replaced or not."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from ..loss import token_losses
from .heads import EncoderFeatures, MaskedLMHead, ReplacedTokenHead
from .image import ImageEncoder
from .text import Encoder

_IMAGE_KEYS = ("images",)
_TEXT_KEYS = ("tokens", "mask", "token_types")


def classification_loss(
    model: ImageEncoder | Encoder, batch: Mapping[str, Array], *, key: Key[Array, "batch"] | None = None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the sum of log Z - logit[label], in float32, and the number of labels.

    - `batch`: `labels`, "batch" or, for classes of tokens, "batch seq"; a negative label is ignored. Images as
      `images`, "batch channels height width"; texts as `tokens`, and optionally a padding `mask` and `token_types`. For
      a `ReplacedTokenHead`, labels are "batch seq": 1 for a replaced token, 0 for any other.

    **Raises** `TypeError` for a model that has no logits of classes, and `ValueError` for a batch without inputs or
    labels, or with a key that nothing reads.
    """
    inputs, *optional = _TEXT_KEYS if isinstance(model, Encoder) else _IMAGE_KEYS
    if missing := [name for name in (inputs, "labels") if name not in batch]:
        raise ValueError(f"the batch has no {' and no '.join(missing)}, only {', '.join(batch) or 'nothing'}")
    if unread := [name for name in batch if name not in (inputs, "labels", *optional)]:
        raise ValueError(f"the batch has {unread[0]}, which nothing reads: take it out")
    if isinstance(model.head, MaskedLMHead):
        raise TypeError(
            "the model has a MaskedLMHead, which cross_entropy trains; a loss over classes needs a classifier"
        )
    logits = model(batch[inputs], key=key, **{name: batch[name] for name in optional if name in batch})
    if isinstance(logits, EncoderFeatures):
        raise TypeError("the model has a FeatureHead, and a loss over classes needs a ClassificationHead")
    if isinstance(model.head, ReplacedTokenHead):
        logits = jnp.stack([jnp.zeros_like(logits), logits], axis=-1)  # of two classes, the first with a logit of 0
    losses = token_losses(logits, batch["labels"])
    return losses.sum(), (batch["labels"] >= 0).sum().astype(jnp.float32)
