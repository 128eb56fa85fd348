"""Gated linear attention: recurrences whose matrix state decays and is added to.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ              S: [key_dim, value_dim] of each head
    o_t = scale q_tᵀ S_t
    o_t = scale q_tᵀ (S_{t-1} + diag(u) k_t v_tᵀ)        with a bonus u for the current token (RWKV-6)

The log decay g <= 0 of a step is None (linear attention, Katharopoulos et al., arXiv:2006.16236), one per head
(retention, arXiv:2307.08621; Mamba-2, arXiv:2405.21060; mLSTM, arXiv:2405.04517) or one per key channel (GLA,
arXiv:2312.06635; RWKV-6, arXiv:2404.05892). Queries and keys may have fewer heads (`groups`) than values: value head i
uses query head i // (heads // groups), as in Mamba-2.

`recurrent_gated_linear` is this, token by token: the reference, and the decode step. `chunked_gated_linear` is for
training: for a chunk of C tokens and the state S before it,

    o_i = scale [ exp(g_1 + ... + g_i) q_i S + sum over j <= i of (q_i · k_j exp(g_{j+1} + ... + g_i)) v_j ]
    S'  = exp(g_1 + ... + g_C) S + sum over j of exp(g_{j+1} + ... + g_C) k_j v_jᵀ

in which all sums are matrix products, batched over chunks; only the states between chunks are sequential (Hua et al.,
arXiv:2202.10447, section 3; arXiv:2312.06635, section 4).

FLOPs per token and head, with K = key_dim and V = value_dim: `recurrent_gated_linear` 5 K V; `chunked_gated_linear`
2 C (K + V) within the chunk, masked pairs included, and 4 K V with the state; with one decay per key channel C K less,
because recursive halving skips masked pairs, and 2 log2(C) K exponentials; for a shard of a sequence 2 K V / C more.
Bytes: `recurrent_gated_linear` reads and writes the state, 8 K V, at every token; `chunked_gated_linear` 12 K V / C for
the states between chunks, and 4 C for scores and their decays.

Rounding: the products of `chunked_gated_linear` round by 1e-7 of the largest terms in float32; decays add no more than
the rounding of their sum between two tokens. In half precision the scores, the decayed keys or values and the state at
its read are rounded; states and decays are float32.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from zoo.shapes import LogDecays, MatrixState, SegmentIds, Values

from ..varying import align_varying, vary, varying
from .affine import DiagonalAffineMap, IncomingState
from .chunks import (
    batched_matmul,
    causal_mask,
    count_segment_starts,
    decay_from_start,
    decay_to_end,
    decayed_product,
    exp_segsum,
    find_segment_starts,
    join_chunks,
    split_into_chunks,
)
from .pallas.common import make_pallas_implementation
from .pallas.gated_linear import find_gated_linear_obstacle, pallas_gated_linear
from .select import RecurrenceRequest, make_recurrence

_CHUNK_SIZE = 64
"""Tokens per chunk, a power of two. With key_dim 64, half of the FLOPs are within chunks."""


def gated_linear(
    query: Float[Array, "batch seq groups key_dim"],
    key: Float[Array, "batch seq groups key_dim"],
    value: Values,
    log_decay: LogDecays | None = None,
    *,
    bonus: Float[Array, "heads key_dim"] | None = None,
    scale: float | int = 1.0,
    state: MatrixState | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: str = "auto",
) -> tuple[Values, MatrixState]:
    """Compute gated linear attention by an implementation of `GATED_LINEAR`.

    **Raises** `ValueError` as `recurrent_gated_linear` does, for an unknown implementation, and for one that cannot
    compute the call, with the reason.
    """
    request = RecurrenceRequest.from_heads(query, value, log_decay, has_bonus=bonus is not None, state=state)
    run = GATED_LINEAR.select(implementation, request).function
    return run(query, key, value, log_decay, bonus=bonus, scale=scale, state=state, segment_ids=segment_ids)


def recurrent_gated_linear(
    query: Float[Array, "batch seq groups key_dim"],
    key: Float[Array, "batch seq groups key_dim"],
    value: Values,
    log_decay: LogDecays | None = None,
    *,
    bonus: Float[Array, "heads key_dim"] | None = None,
    scale: float | int = 1.0,
    state: MatrixState | None = None,
    segment_ids: SegmentIds | None = None,
) -> tuple[Values, MatrixState]:
    """Scan over tokens in float32: returns the outputs and the state after the last token.

    `state` is the initial state, zero by default; every segment but the first resets it.

    **Raises** `ValueError` if groups do not divide heads, or if heads with decays per key channel share keys.
    """
    dtype = value.dtype
    group = _heads_per_group(query, value, log_decay)
    query, key, value, decays, bonus, initial = _prepare_gated_operands(query, key, value, log_decay, bonus, state)
    query, key = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (query, key))
    if segment_ids is None:
        starts = jnp.zeros(value.shape[:2], bool)
    else:
        starts = find_segment_starts(segment_ids)

    def step(state, token):
        query, key, value, log_decay, is_start = token
        state = jnp.where(is_start[:, None, None, None], 0, state)
        update = key[..., :, None] * value.astype(jnp.float32)[..., None, :]
        decayed = jnp.exp(log_decay)[..., None] * state
        read = decayed + update if bonus is None else state + bonus[..., None] * update
        return decayed + update, (query[..., :, None] * read).sum(-2)

    if decays.ndim == 3:
        decays = decays[..., None]
    xs = (query, key, value, decays, starts)
    last, output = lax.scan(step, initial, [x.swapaxes(0, 1) for x in xs])
    return (scale * output.swapaxes(0, 1)).astype(dtype), last


def chunked_gated_linear(
    query: Float[Array, "batch seq groups key_dim"],
    key: Float[Array, "batch seq groups key_dim"],
    value: Values,
    log_decay: LogDecays | None = None,
    *,
    bonus: Float[Array, "heads key_dim"] | None = None,
    scale: float | int = 1.0,
    state: MatrixState | IncomingState | None = None,
    segment_ids: SegmentIds | None = None,
    chunk_size: int = _CHUNK_SIZE,
) -> tuple[Values, MatrixState]:
    """Compute `recurrent_gated_linear` by matrix products over chunks of `chunk_size` tokens, a power of two.

    For a shard of a sequence `state` is an `IncomingState`, called with the map of the tokens.

    **Raises** `ValueError` as `recurrent_gated_linear`.
    """
    dtype = value.dtype
    seq = value.shape[1]
    group = _heads_per_group(query, value, log_decay)
    find_state = None
    if callable(state):
        find_state = state
        state = None
    query, key, value, decays, bonus, initial = _prepare_gated_operands(query, key, value, log_decay, bonus, state)
    count = count_segment_starts(segment_ids, seq, chunk_size)[:, :, None]
    query, key, value, decays = (split_into_chunks(x, chunk_size) for x in (query, key, value, decays))
    # [batch chunks heads size size]
    scores = _compute_intra_chunk_scores(query, key, decays, bonus, count, no_decay=log_decay is None)
    intra_chunk = batched_matmul(scores.astype(dtype), value)
    last, states = scan_chunk_maps(compute_chunk_maps(key, value, decays, count), initial, find_state)
    continues = (count == 0)[..., None]
    if decays.ndim == 5:
        decay = jnp.where(continues, decay_from_start(decays, exclusive=bonus is not None), 0)
        inter_chunk = batched_matmul((query * decay).astype(query.dtype), states.astype(query.dtype))
    else:
        decay = jnp.where(continues, decay_from_start(decays[..., None], exclusive=bonus is not None), 0)
        read = batched_matmul(query, _merge_head_groups(states, group).astype(query.dtype))
        inter_chunk = decay * _split_head_groups(read, group)
    return join_chunks((scale * (intra_chunk + inter_chunk)).astype(dtype), seq), last


def _heads_per_group(query: Array, value: Array, log_decay: Array | None) -> int:
    """Return the number of value heads per query head. **Raises** `ValueError` if they do not match."""
    groups = query.shape[2]
    heads = value.shape[2]
    if heads % groups:
        raise ValueError(
            f"gated_linear: {heads} heads of values do not divide evenly over {groups} heads of queries and keys"
        )
    if heads != groups and log_decay is not None and log_decay.ndim == 4:
        raise ValueError(
            f"gated_linear: {heads} heads of values share {groups} heads of keys, whose decays are vectors: such a "
            "decay belongs to one key head. Repeat queries and keys."
        )
    return heads // groups


def _prepare_gated_operands(query, key, value, log_decay, bonus, state) -> tuple[Any, ...]:
    """Fill in defaults, with decays and state in float32, and align the varying mesh axes."""
    if log_decay is None:
        log_decay = jnp.zeros(value.shape[:3], jnp.float32)
    if state is None:
        state = jnp.zeros((value.shape[0], value.shape[2], key.shape[3], value.shape[3]), jnp.float32)
    return align_varying(query, key, value, log_decay.astype(jnp.float32), bonus, state.astype(jnp.float32))


def _compute_intra_chunk_scores(
    query: Float[Array, "batch chunks groups size key_dim"],
    key: Float[Array, "batch chunks groups size key_dim"],
    log_decay: Float[Array, "batch chunks heads size *key_dim"],
    bonus: Float[Array, "heads key_dim"] | None,
    count: Int[Array, "_ chunks 1 size"],
    *,
    no_decay: bool,
) -> Float[Array, "batch chunks heads size size"]:
    """Compute the decayed, masked scores within chunks. `no_decay` says that all log decays are zero."""
    exclusive = bonus is not None
    if log_decay.ndim == 5:
        scores = decayed_product(query, key, log_decay, exclusive=exclusive)
    else:
        scores = jnp.repeat(batched_matmul(query, key.mT), log_decay.shape[2] // query.shape[2], axis=2)
        mask = causal_mask(query.shape[-2], strict=exclusive)
        if no_decay:
            scores = jnp.where(mask, scores, 0)
        else:
            scores = scores * exp_segsum(log_decay, exclusive=exclusive)
    scores = jnp.where(count[..., :, None] == count[..., None, :], scores, 0)
    if bonus is None:
        return scores
    diagonal = (query.astype(jnp.float32) * key * bonus[:, None, :]).sum(-1)
    return scores + jnp.where(jnp.eye(query.shape[-2], dtype=bool), diagonal[..., None], 0)


def compute_chunk_maps(
    key: Float[Array, "batch chunks groups size key_dim"],
    value: Float[Array, "batch chunks heads size value_dim"],
    log_decay: Float[Array, "batch chunks heads size *key_dim"],
    count: Int[Array, "_ chunks 1 size"],
) -> DiagonalAffineMap:
    """Compute the map of each chunk, with the chunk dim first: its total decay, and its update of the state."""
    in_last_segment = (count == count[..., -1:])[..., None]
    log_decays = log_decay if log_decay.ndim == 5 else log_decay[..., None]
    to_end = jnp.where(in_last_segment, decay_to_end(log_decays), 0)
    chunk_decay = jnp.where(count[..., -1:] == 0, jnp.exp(log_decays.sum(-2)), 0)
    if log_decay.ndim == 5:
        update = batched_matmul((key * to_end).astype(key.dtype).mT, value)
    else:
        group = value.shape[2] // key.shape[2]
        decayed = _merge_head_groups((value * to_end).astype(value.dtype), group)
        update = _split_head_groups(batched_matmul(key.mT, decayed), group)
    return DiagonalAffineMap(chunk_decay.swapaxes(0, 1)[..., None], update.swapaxes(0, 1))


def scan_chunk_maps(
    chunks: DiagonalAffineMap, initial: MatrixState, find_state: IncomingState | None
) -> tuple[MatrixState, Float[Array, "batch chunks heads key_dim value_dim"]]:
    """Return the last state and the state before each chunk, from the initial state, or with `find_state` from what it
    returns for the map of all chunks; `initial` is then an empty state."""
    if find_state is None:
        last, states = lax.scan(lambda state, chunk: (chunk.apply(state), state), initial, chunks)
    else:
        total, before = _compose_chunk_maps(chunks, initial)
        initial = find_state(total)
        last = total.apply(initial)
        states = before.apply(initial)
    return last, states.swapaxes(0, 1)


def _compose_chunk_maps(chunks: DiagonalAffineMap, zeros: MatrixState) -> tuple[DiagonalAffineMap, DiagonalAffineMap]:
    """Return the map of all chunks, and for each chunk the map of all tokens before it. `zeros` is an empty state."""
    identity = DiagonalAffineMap(vary(jnp.ones_like(chunks.factor[0]), varying(zeros)), zeros)
    return lax.scan(lambda earlier, chunk: (earlier.then(chunk), earlier), identity, chunks)


def _merge_head_groups(
    x: Float[Array, "batch chunks heads rows dim"], group: int
) -> Float[Array, "batch chunks groups rows _"]:
    """Concatenate the heads of each key group along the last dim, for one product per group."""
    if group == 1:
        return x
    batch, chunks, heads, rows, dim = x.shape
    x = x.reshape(batch, chunks, heads // group, group, rows, dim)
    return x.swapaxes(3, 4).reshape(batch, chunks, heads // group, rows, group * dim)


def _split_head_groups(
    x: Float[Array, "batch chunks groups rows _"], group: int
) -> Float[Array, "batch chunks heads rows dim"]:
    """Invert `_merge_head_groups`."""
    if group == 1:
        return x
    batch, chunks, groups, rows, width = x.shape
    x = x.reshape(batch, chunks, groups, rows, group, width // group)
    return x.swapaxes(3, 4).reshape(batch, chunks, groups * group, rows, width // group)


GATED_LINEAR = make_recurrence(
    "gated linear attention",
    recurrent_gated_linear,
    chunked_gated_linear,
    make_pallas_implementation(pallas_gated_linear, find_gated_linear_obstacle),
)
"""Implementations of gated linear attention, in the order in which `"auto"` tries them."""
