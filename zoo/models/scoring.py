"""Hidden states of all layers, and log-probabilities of given tokens."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo._checks import check_chunk
from zoo.layers import TokenInfo
from zoo.layers.token_info import token_info
from zoo.parallel import all_gather, num_shards, shard
from zoo.parallel.tokens import replicate_tokens
from zoo.shapes import PaddingMask, Positions, SegmentIds, Tokens

from .capture import Capture
from .decoder import AbstractBlock, Decoder, UnrolledStack
from .encoders.image import ImageEncoder
from .encoders.text import Encoder
from .image_places import Spans
from .image_text import ImageText, SeenImages, check_texts, read_images, require_spans
from .log_probs import map_targets
from .loss import token_losses
from .stack import Stack, swap_stack


def hidden_states(
    model: Decoder | Encoder | ImageText,
    tokens: Tokens,
    *,
    images: SeenImages | None = None,
    mask: PaddingMask | None = None,
    segment_ids: SegmentIds | None = None,
    positions: Positions | None = None,
) -> tuple[Float[Array, "batch seq _"], ...]:
    """Return the hidden states between layers, as `output_hidden_states` of transformers does: the input of the first
    layer, then the output of each, the last one after the final norm.

    These are layers + 1. For some families, such as Mamba and RWKV, transformers leaves out the first and appends the
    normalized one (`model.hidden_states_skip_embedding`). Parallel residual streams (Gemma 3n) are side by side here,
    and the last is after the norm as well. Edits of a model (`zoo.patch`) are made. Arguments are as for the model. Of
    an `ImageText` the input of the first layer has the features of `images`.
    """
    check_texts(model, tokens, images)
    info = token_info(tokens, mask=mask, segment_ids=segment_ids, positions=positions).mask_padding()
    return _compute_hidden_states(model, tokens, images, info)


@eqx.filter_jit
def _compute_hidden_states(
    model: Decoder | Encoder | ImageText, tokens: Tokens, images: SeenImages | None, info: TokenInfo
) -> tuple[Float[Array, "batch seq _"], ...]:
    reader, info = read_images(model, tokens, images, info)
    blocks = unstack_blocks(reader)
    names = ("layers.0.input", *(f"layers.{number}" for number in range(len(blocks))))
    unrolled = swap_stack(reader, lambda stack: UnrolledStack(blocks))
    (last, _), values = Capture(unrolled.hidden, names).run(tokens, info)
    states = [replicate_tokens(values[name].array) for name in names]
    before = states[1:] if reader.hidden_states_skip_embedding else states[:-1]
    return (*before, last.x)


def unstack_blocks(model: Decoder | Encoder | ImageEncoder) -> tuple[AbstractBlock, ...]:
    """Return the block of each layer. **Raises** `TypeError` for a stack that is not a `Stack` or `UnrolledStack`."""
    if not isinstance(model.stack, Stack | UnrolledStack):
        raise TypeError(f"layers are needed one by one, and {type(model.stack).__name__} cannot be taken apart")
    return tuple(model.stack.iter_blocks())


def score(
    model: Decoder | ImageText,
    tokens: Tokens,
    *,
    images: SeenImages | None = None,
    spans: Spans | None = None,
    mask: PaddingMask | None = None,
    segment_ids: SegmentIds | None = None,
    positions: Positions | None = None,
    chunk: int = 1024,
) -> Float[Array, "batch _"]:
    """Compute the log-probability of each token given those before it, log p(x_t | x_<t), in float32. The first token
    of a row has none.

    - `mask`, `segment_ids`, `positions`: as for the model. A token that follows padding or another document, or is
      padding, scores 0: the sum over a row is the log-probability of its documents given their first tokens.
    - `images`, `spans`: of an `ImageText`, as for the model. Tokens that see later ones, such as image tokens, have
      scores, too, which mean nothing.
    - `chunk`: tokens whose logits are in memory at a time; the backward pass rematerializes them.

    Where a mesh shards the sequence, each device scores its own tokens, and the scores are all-gathered, 4 bytes per
    token: the result has the same shape on every mesh. A loss sums and counts all of them on each device.

    **Raises** `TypeError` for an encoder; `ValueError` for no rows, fewer than 2 tokens, a `chunk` below 1, and a model
    that reads a prefix in both directions (PaliGemma) without `spans`; also as the model does. Inside programs an id
    outside the vocabulary scores NaN.
    """
    check_texts(model, tokens, images)
    require_spans(model, spans)
    check_chunk(chunk, tokens.shape)
    if isinstance(model, Encoder):
        raise TypeError(
            "an Encoder attends in both directions, so that it sees the token that it would score: score with a Decoder"
        )
    if tokens.shape[1] * num_shards(tokens, "seq") < 2:
        raise ValueError(f"the first token has no score, so that a row needs 2 or more: {tokens.shape=}")
    info = token_info(tokens, mask=mask, segment_ids=segment_ids, positions=positions).mask_padding()
    reader, info = read_images(model, tokens, images, info, spans)
    following = _shift_tokens(tokens)
    scores = -map_targets(token_losses, reader, tokens, info, following, chunk)
    scores = jnp.where(following < 0, jnp.nan, scores)  # no id here is to be ignored
    scores = all_gather(scores, "seq", axis=1)[:, :-1]
    if info.segment_ids is None:
        return scores
    segment_ids = all_gather(info.segment_ids, "seq", axis=1)
    is_scored = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)  # 0 is padding
    return jnp.where(is_scored, scores, 0)


def _shift_tokens(tokens: Tokens) -> Tokens:
    """Return the next token of each; the last token of a row, which has none, is paired with the first.

    Where the sequence is sharded, the last token of a shard is followed by the first of the next.
    """
    if num_shards(tokens, "seq") == 1:
        return jnp.roll(tokens, -1, axis=1)
    return shard(jnp.roll(all_gather(tokens, "seq", axis=1), -1, axis=1), "seq", axis=1)
