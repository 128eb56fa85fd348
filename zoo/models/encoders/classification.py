"""Cross-entropy over classes: of images, of texts, or of tokens; of tokens that were replaced or not.

Texts are classified by an encoder, or by a decoder with scores.
"""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from ..loss import token_losses
from ..segment_sums import sum_segments
from ..sequence_score import SequenceScore, require_whole_texts
from .heads import EncoderFeatures, MaskedLMHead, ReplacedTokenHead
from .image import ImageEncoder
from .text import Encoder

_IMAGE_KEYS = ("images",)
_TEXT_KEYS = ("tokens", "mask", "token_types")
_SCORE_KEYS = ("tokens", "mask", "segment_ids", "positions")


def classification_loss(
    model: ImageEncoder | Encoder | SequenceScore, batch: Mapping[str, Array], *, key: Key[Array, "batch"] | None = None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the sum of log Z - logit[label], in float32, and the number of labels.

    - `batch`: `labels`, "batch" or, for classes of tokens, "batch seq"; a negative label is ignored. Images as
      `images`, "batch channels height width"; texts as `tokens`, and optionally a padding `mask` and `token_types`. For
      a `ReplacedTokenHead`, labels are "batch seq": 1 for a replaced token, 0 for any other.

    For a `SequenceScore`, `labels` may also be "batch texts", a label for each segment of packed rows: rows of
    `zoo.train.PackedRows(..., whole=True)`, as `SequenceScore.score_texts` reads them. Labels beyond the last segment
    are ignored.

    **Raises** `TypeError` for a model that has no logits of classes, and `ValueError` for a batch without inputs or
    labels, or with a key that nothing reads; also for one class, whose loss would always be 0.
    """
    if isinstance(model, SequenceScore):
        return _score_loss(model, batch, key)
    inputs, *optional = _TEXT_KEYS if isinstance(model, Encoder) else _IMAGE_KEYS
    _check_keys(batch, inputs, optional)
    if isinstance(model.head, MaskedLMHead):
        raise TypeError(
            "the model has a MaskedLMHead, which cross_entropy trains; a loss over classes needs a classifier"
        )
    logits = model(batch[inputs], key=key, **{name: batch[name] for name in optional if name in batch})
    if isinstance(logits, EncoderFeatures):
        raise TypeError("the model has a FeatureHead, and a loss over classes needs a ClassificationHead")
    if isinstance(model.head, ReplacedTokenHead):
        logits = jnp.stack([jnp.zeros_like(logits), logits], axis=-1)  # of two classes, the first with a logit of 0
    return _sum_losses(logits, batch["labels"])


def _score_loss(
    model: SequenceScore, batch: Mapping[str, Array], key: Key[Array, "batch"] | None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    if model.score.out_size < 2:
        raise ValueError(
            "the model has scores of one class, whose cross-entropy is always 0: a reward model is trained by "
            "zoo.train.objectives.pairwise_reward"
        )
    labels = batch.get("labels")
    if labels is None or labels.ndim != 2:
        inputs, *optional = _SCORE_KEYS
        _check_keys(batch, inputs, optional)
        options = {name: batch[name] for name in optional if name in batch}
        return _sum_losses(model(batch[inputs], key=key, **options), batch["labels"])
    require_whole_texts(batch)
    scores = model.score_texts(batch, labels.shape[1], key=key)
    is_there = sum_segments(batch["weights"], batch["segment_ids"], labels.shape[1]) > 0
    classes = jnp.where(labels == jnp.floor(labels), labels, scores.shape[-1])  # a label of 0.5 gives NaN
    return _sum_losses(scores, jnp.where(is_there, classes, -1).astype(jnp.int32))


def _check_keys(batch: Mapping[str, Array], inputs: str, optional: Sequence[str]) -> None:
    """**Raises** `ValueError` for a batch without inputs or labels, or with a key that nothing reads."""
    if missing := [name for name in (inputs, "labels") if name not in batch]:
        raise ValueError(f"the batch has no {' and no '.join(missing)}, only {', '.join(batch) or 'nothing'}")
    if unread := [name for name in batch if name not in (inputs, "labels", *optional)]:
        raise ValueError(f"the batch has {unread[0]}, which nothing reads: take it out")


def _sum_losses(logits: Float[Array, "*rows classes"], labels: Int[Array, "*rows"]) -> tuple[Array, Array]:
    """Return the sum of the losses, and the number of labels that are not negative."""
    return token_losses(logits, labels).sum(), (labels >= 0).sum().astype(jnp.float32)
