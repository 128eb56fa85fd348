"""What a model makes of tokens that are given: its hidden states, and how likely it finds each token."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.layers import TokenInfo
from zoo.layers.token_info import token_info
from zoo.parallel import gather, num_shards, scan

from .decoder import AbstractBlock, Decoder, UnrolledStack
from .loss import token_losses
from .stack import Stack


def hidden_states(
    model: Decoder,
    tokens: Int[Array, "batch seq"],
    *,
    mask: Bool[Array, "batch seq"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    positions: Int[Array, "batch seq"] | None = None,
) -> tuple[Float[Array, "batch seq embed"], ...]:
    """What flows between layers: the input of the first, then the output of each, the last after the final norm.

    One more than there are layers, counted as transformers counts its `hidden_states`. Of some families, Mamba and RWKV
    among them, it counts otherwise (`model.lists_outputs`): the output of each layer, then the last after the final
    norm. Arguments as the model's own.
    """
    return _compute_hidden_states(
        model, tokens, token_info(tokens, mask=mask, segment_ids=segment_ids, positions=positions)
    )


@eqx.filter_jit
def _compute_hidden_states(
    model: Decoder, tokens: Int[Array, "batch seq"], info: TokenInfo
) -> tuple[Float[Array, "batch seq embed"], ...]:
    stream = model.embed(tokens, info)
    found = [stream.x]
    for number, block in enumerate(unstack_blocks(model)):
        stream, _ = gather(block)(stream, info.fold_keys(number))
        found.append(stream.x)
    return (*(found[1:] if model.hidden_states_skip_embedding else found[:-1]), gather(model.norm)(found[-1]))


def unstack_blocks(model: Decoder) -> tuple[AbstractBlock, ...]:
    """The block of each layer. **Raises** `TypeError` for a stack that cannot be taken apart."""
    layers = model.stack.unstack() if isinstance(model.stack, Stack) else model.stack
    if not isinstance(layers, UnrolledStack):
        raise TypeError(f"layers are looked at one by one, and a {type(layers).__name__} cannot be taken apart")
    return layers.blocks


def score(
    model: Decoder,
    tokens: Int[Array, "batch seq"],
    *,
    mask: Bool[Array, "batch seq"] | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    positions: Int[Array, "batch seq"] | None = None,
    chunk: int = 1024,
) -> Float[Array, "batch seq-1"]:
    """log p(token | those before it), of each token after the first, in float32.

    - `mask`, `segment_ids`, `positions`: as the model's own. What follows padding or another document, or is padding,
      scores 0: a row's sum is the log-probability of its documents, each given its first token.
    - `chunk`: how many tokens have logits at a time; in a gradient they are computed again.

    **Raises** `ValueError` for fewer than 2 tokens, and where a mesh splits the sequence.
    """
    if tokens.shape[1] < 2:
        raise ValueError(f"the first token has no score, so that a row needs 2 or more: {tokens.shape=}")
    if num_shards(tokens, "seq") > 1:
        raise ValueError("score reads the next token of each, which another device holds where the sequence is split")
    info = token_info(tokens, mask=mask, segment_ids=segment_ids, positions=positions)
    stream, _ = model.hidden(tokens, info)
    x = stream.x[:, :-1]
    scores = -_chunked_token_losses(
        model.gather_unembedding(), x.reshape(-1, x.shape[-1]), tokens[:, 1:].reshape(-1), chunk
    )
    scores = scores.reshape(x.shape[:2])
    if info.segment_ids is None:
        return scores
    counted = info.segment_ids[:, 1:] == info.segment_ids[:, :-1]
    if mask is not None:
        counted &= mask[:, 1:]
    return jnp.where(counted, scores, 0)


def _chunked_token_losses(
    head: eqx.Module, x: Float[Array, "tokens embed"], targets: Int[Array, "tokens"], chunk: int
) -> Float[Array, "tokens"]:
    size = min(chunk, len(x))
    short = -len(x) % size
    rows = jnp.pad(x, ((0, short), (0, 0))).reshape(-1, size, x.shape[-1])
    parameters, static = eqx.partition(head, eqx.is_array)

    @partial(jax.checkpoint, prevent_cse=False)
    def one(x: Array, targets: Array) -> Array:
        return token_losses(eqx.combine(parameters, static)(x), targets)

    _, found = scan(lambda none, now: (none, one(*now)), (), (rows, jnp.pad(targets, (0, short)).reshape(-1, size)))
    return found.reshape(-1)[: len(x)]
