"""Scores of texts by a decoder: text classification with one score per class, and reward models with one."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key

from zoo._checks import check_tokens, is_host_readable
from zoo.layers import AbstractLinear, Linear, TokenInfo
from zoo.layers.token_info import batch_token_info, token_info
from zoo.parallel import Dim, Module, gather, implementation_option, num_shards, reduce
from zoo.parallel.collectives import shard_offset
from zoo.parallel.fields import wrapped
from zoo.parallel.trainable_copy import materialize
from zoo.shapes import PaddingMask, Positions, SegmentIds, Tokens

from .decoder import Decoder, find_checkable_vocab
from .hf.spec import Origin
from .segment_sums import sum_segments
from .targets import get_linear_shape
from .torch_habits import explain_torch_habit, hash_for_jit

_NO_UNEMBEDDING = (
    "the decoder of a SequenceScore has no unembedding: it computes hidden states, model.decoder.hidden(tokens, info), "
    "and no logits of tokens"
)


class NoUnembedding(AbstractLinear):
    """In the place of a decoder's head: no parameters, and no logits of tokens."""

    @property
    def out_size(self) -> int:
        raise TypeError(_NO_UNEMBEDDING)

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*tokens out"]:
        """**Raises** `TypeError`."""
        raise TypeError(_NO_UNEMBEDDING)

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        """**Raises** `TypeError`."""
        raise TypeError(_NO_UNEMBEDDING)


class SequenceScore(Module):
    """Scores of a text: W h, with h the decoder's normalized hidden state at the last token (Ouyang et al.,
    arXiv:2203.02155, section 3.5).

        model = zoo.models.SequenceScore.from_decoder(zoo.load("Qwen/Qwen3-0.6B"), classes=4, key=key)
        scores = model(tokens, mask=mask)  # batch classes

    With one class it is a reward model, with more a classifier whose scores are logits. `zoo.load` and `zoo.save` read
    and write it as `XForSequenceClassification` of transformers. Parameters have the names that they have in the
    decoder, and `score.weight`.

    transformers reads a row at its rightmost token other than `pad_token_id`, and here the `mask` says which tokens are
    real. The two differ for a text that ends with `pad_token_id`, which transformers reads too early.
    """

    decoder: Decoder = wrapped()
    """Has a `NoUnembedding` for a head. A tied embedding is only an embedding."""
    score: AbstractLinear
    origin: Origin | None = implementation_option(default=None)
    """The checkpoint that the model, or its decoder, was loaded from, which `zoo.save` needs."""

    if not TYPE_CHECKING:  # for a type checker every name would be an attribute

        def __getattr__(self, name: str) -> Any:
            if name in Decoder.__dataclass_fields__:
                raise AttributeError(
                    f"'SequenceScore' object has no attribute {name!r}: model.decoder has it, a Decoder without "
                    "unembedding",
                    name=name,
                    obj=self,
                )
            explain_torch_habit(self, name)

    def __hash__(self) -> int:
        return hash_for_jit(self)

    @staticmethod
    def from_decoder(decoder: Decoder, classes: int = 1, *, key: Key[Array, ""]) -> "SequenceScore":
        """Make a model of scores from a language model: drop its unembedding, and initialize `score`.

        `score` has the dtype of the decoder's activations. Place the result on a mesh with `zoo.place`.

        **Raises** `ValueError` for fewer than 1 class; `TypeError` for a decoder without unembedding.
        """
        if classes < 1:
            raise ValueError(f"classes is {classes}: expected at least 1, which is a reward model")
        if isinstance(decoder.head, NoUnembedding):
            raise TypeError("the decoder has no unembedding: it is that of a SequenceScore, so keep its score")
        activations = jax.eval_shape(materialize(decoder.embedding), jnp.zeros((1, 1), jnp.int32))
        if decoder.head is None:
            embed = activations.shape[-1]
        else:
            embed = get_linear_shape(decoder.head)[1]
        score = Linear(embed, classes, in_=Dim("embed"), out=Dim("classes"), key=key)
        score = jax.tree.map(lambda x: x.astype(activations.dtype), score)
        origin = decoder.origin
        return SequenceScore(dataclasses.replace(decoder, head=NoUnembedding(), origin=None), score, origin)

    def __call__(
        self,
        tokens: Tokens,
        *,
        mask: PaddingMask | None = None,
        segment_ids: SegmentIds | None = None,
        positions: Positions | None = None,
        key: Key[Array, ""] | Key[Array, "batch"] | None = None,
    ) -> Float[Array, "batch classes"]:
        """Return the scores at the last real token of each row; 0 for a row of padding.

        Arguments are as for `zoo.models.Decoder`. `score_texts` reads packed rows, which hold several texts.

        **Raises** `ValueError` and `TypeError` as `zoo.models.Decoder`; `ValueError` for a mask where the mesh shards
        the sequence, which `segment_ids` and `positions` take the place of.
        """
        if mask is not None and num_shards(tokens, "seq") > 1:
            raise ValueError(
                "the mesh shards the sequence, and positions cannot be counted there: instead of a mask, pass "
                "segment_ids, 1 for real tokens and 0 for padding, and positions"
            )
        check_tokens(tokens, find_checkable_vocab(self.decoder))
        info = token_info(tokens, mask=mask, segment_ids=segment_ids, positions=positions, key=key)
        scores = self._score(tokens, info)
        is_last = _find_last_tokens(tokens, info.mask_padding())
        return reduce(jnp.where(is_last[..., None], scores, 0).sum(1), over="seq")

    def score_tokens(
        self, batch: Mapping[str, Array], *, key: Key[Array, "batch"] | None = None
    ) -> Float[Array, "batch seq classes"]:
        """Return the scores at every token, sharded as the batch is: those of the text up to this token.

        - `batch`: `tokens`, and optionally `segment_ids` and `positions`, as `zoo.cross_entropy` takes it. `targets`,
          `weights` and `labels` are left to the loss.

        **Raises** `ValueError` for a batch without `tokens`, or with a key that nothing reads.
        """
        batch = {name: x for name, x in batch.items() if name != "labels"}
        info = batch_token_info(batch, key)
        check_tokens(batch["tokens"], find_checkable_vocab(self.decoder))
        return self._score(batch["tokens"], info)

    def score_texts(
        self, batch: Mapping[str, Array], texts: int, *, key: Key[Array, "batch"] | None = None
    ) -> Float[Array, "batch texts classes"]:
        """Return the scores of the texts of packed rows: text t of a row is segment t + 1. A text that is not there
        scores 0.

            chosen, rejected = model.score_texts(batch, 2)[..., 0].T  # pairs, each of them a row of two texts

        - `batch`: rows of `zoo.train.PackedRows(..., whole=True)`, whose `weights` mark the last token of each text. A
          weight on a token that has a target gives NaN: other rows lack the last token of each text.

        **Raises** `ValueError` for a batch without `weights` or `segment_ids`, for a row of more texts (inside
        programs, its scores are NaN), and as `score_tokens`.
        """
        require_whole_texts(batch)
        segment_ids = batch["segment_ids"]
        if is_host_readable(segment_ids) and np.max(segment_ids, initial=0) > texts:
            raise ValueError(
                f"a row has {np.max(segment_ids)} texts, and scores of {texts} were asked for: ask for all of them, or "
                "take rows with pack=False"
            )
        scores = self.score_tokens(batch, key=key) * batch["weights"][..., None]
        if "targets" in batch:
            is_wrong = (batch["targets"] >= 0) & (batch["weights"] != 0)
            scores = jnp.where(is_wrong[..., None], jnp.nan, scores)
        most = reduce(segment_ids.max(1), over="seq", by=lax.pmax)
        return jnp.where((most > texts)[:, None, None], jnp.nan, sum_segments(scores, segment_ids, texts))

    def _score(self, tokens: Tokens, info: TokenInfo) -> Float[Array, "batch seq classes"]:
        hidden, _ = self.decoder.hidden(tokens, info)
        return gather(self.score)(hidden.x)


def require_whole_texts(batch: Mapping[str, Array]) -> None:
    """**Raises** `ValueError` for a batch without the arrays that tell where each text ends."""
    if missing := [name for name in ("weights", "segment_ids") if name not in batch]:
        raise ValueError(
            f"the batch has no {' and no '.join(missing)}: a text is read at the token of its segment that weights "
            "mark, as zoo.train.PackedRows(..., whole=True) does"
        )


def _find_last_tokens(tokens: Tokens, info: TokenInfo) -> Int[Array, "batch seq"]:
    """Return 1 at the last token of each row that is not padding, and 0 elsewhere; also where `seq` is sharded."""
    length = tokens.shape[1]
    index = jnp.broadcast_to(jnp.arange(length) + shard_offset(tokens, "seq", length), tokens.shape)
    if info.segment_ids is not None:
        index = jnp.where(info.segment_ids == 0, -1, index)
    last = reduce(lax.stop_gradient(index).max(1), over="seq", by=lax.pmax)
    return ((index == last[:, None]) & (index >= 0)).astype(jnp.int32)
