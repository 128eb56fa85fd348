"""Recurrences whose state decays and is added to: linear attention and all that gates it.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ              S: [key_dim, value_dim] of each head
    o_t = scale q_tᵀ S_t
    o_t = scale q_tᵀ (S_{t-1} + diag(u) k_t v_tᵀ)        with a bonus u for the present token (RWKV-6)

The log decay g <= 0 of a step is nothing (linear attention, Katharopoulos et al., arXiv:2006.16236), a number a head
(retention, arXiv:2307.08621; Mamba-2, arXiv:2405.21060; mLSTM, arXiv:2405.04517) or a number for each of key_dim (GLA,
arXiv:2312.06635; RWKV-6, arXiv:2404.05892). Fewer heads of queries and keys than of values are shared: value head i
reads with query head i // (heads // groups), as in Mamba-2.

`recurrent` is this, one token after another: the oracle, and the step of decoding. `chunked` is what trains: of a chunk
of C tokens, S being the state before it,

    o_i = scale [ exp(g_1 + ... + g_i) q_i S + sum over j <= i of (q_i · k_j exp(g_{j+1} + ... + g_i)) v_j ]
    S'  = exp(g_1 + ... + g_C) S + sum over j of exp(g_{j+1} + ... + g_C) k_j v_jᵀ

in which all sums are matrix products, those of every chunk at once; only states at the borders wait for one another
(Hua et al., arXiv:2202.10447, section 3; arXiv:2312.06635, section 4).

FLOPs a token and head, K and V being key_dim and value_dim: `recurrent` 5 K V; `chunked` 2 C (K + V) in the chunk, all
pairs of it, seen or not, and 4 K V with the state; where decays are vectors C K less, since halves leave out pairs that
are not seen, and 2 log2(C) K exponentials. Bytes: `recurrent` reads and writes the state, 8 K V, at every token;
`chunked` 12 K V / C for the states at borders, and 4 C for scores and their decays.

Rounding: `chunked` has that of its products, 1e-7 of the largest terms in float32; decays add to it no more than the
rounding of the sum between two tokens. Half precision rounds the scores, the decayed keys or values and the state,
where it is read, to itself; states and decays are float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..varying import vary, varying
from .chunks import (
    RecurrenceMode,
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

_CHUNK_SIZE = 64
"""Tokens in a chunk: a power of two. Half of the work is then in the chunk where key_dim is 64."""

_Decay = Float[Array, "batch seq heads"] | Float[Array, "batch seq heads key_dim"]
MatrixState = Float[Array, "batch heads key_dim value_dim"]


class _DiagonalAffineMap(NamedTuple):
    """What a stretch of tokens does to the state: S -> factor S + added. Two stretches one after the other are
    (f2 f1, f2 a1 + a2), which is how a sequence that is split over devices learns its incoming states."""

    factor: Float[Array, "batch heads"] | Float[Array, "batch heads key_dim"]
    """Of every row of the state; 0 where a segment began in the stretch."""
    offset: MatrixState


def select_gated_linear(mode: RecurrenceMode) -> Callable:
    """`recurrent` or `chunked`."""
    return {"recurrent": recurrent_gated_linear, "chunked": chunked_gated_linear}[mode]


def recurrent_gated_linear(
    query: Float[Array, "batch seq groups key_dim"],
    key: Float[Array, "batch seq groups key_dim"],
    value: Float[Array, "batch seq heads value_dim"],
    log_decay: _Decay | None = None,
    *,
    bonus: Float[Array, "heads key_dim"] | None = None,
    scale: float | int = 1.0,
    state: MatrixState | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
) -> tuple[Float[Array, "batch seq heads value_dim"], MatrixState]:
    """The definition, one token after another, in float32: the outputs, and the state after the last.

    The state goes on from `state`, zero unless given, and begins anew with every segment but the first.

    **Raises** `ValueError` where groups do not divide heads, or where heads with vectors for decays share keys.
    """
    dtype = value.dtype
    group = _heads_per_group(query, value, log_decay)
    query, key, value, decays, bonus, initial = _prepare_gated_operands(query, key, value, log_decay, bonus, state)
    query, key = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (query, key))
    first = jnp.zeros(value.shape[:2], bool) if segment_ids is None else find_segment_starts(segment_ids)

    def step(state, now):
        query, key, value, log_decay, first = now
        state = jnp.where(first[:, None, None, None], 0, state)
        new = key[..., :, None] * value.astype(jnp.float32)[..., None, :]
        decayed = jnp.exp(log_decay)[..., None] * state
        read = decayed + new if bonus is None else state + bonus[..., None] * new
        return decayed + new, (query[..., :, None] * read).sum(-2)

    xs = (query, key, value, decays if decays.ndim == 4 else decays[..., None], first)
    after, output = lax.scan(step, initial, [x.swapaxes(0, 1) for x in xs])
    return (scale * output.swapaxes(0, 1)).astype(dtype), after


def chunked_gated_linear(
    query: Float[Array, "batch seq groups key_dim"],
    key: Float[Array, "batch seq groups key_dim"],
    value: Float[Array, "batch seq heads value_dim"],
    log_decay: _Decay | None = None,
    *,
    bonus: Float[Array, "heads key_dim"] | None = None,
    scale: float | int = 1.0,
    state: MatrixState | None = None,
    segment_ids: Int[Array, "batch seq"] | None = None,
    chunk_size: int = _CHUNK_SIZE,
) -> tuple[Float[Array, "batch seq heads value_dim"], MatrixState]:
    """The same in matrix products over chunks of `chunk` tokens, a power of two. What it raises, too, is the same."""
    dtype, seq = value.dtype, value.shape[1]
    group = _heads_per_group(query, value, log_decay)
    query, key, value, decays, bonus, initial = _prepare_gated_operands(query, key, value, log_decay, bonus, state)
    count = count_segment_starts(segment_ids, seq, chunk_size)[:, :, None]
    query, key, value, decays = (split_into_chunks(x, chunk_size) for x in (query, key, value, decays))
    scores = _compute_intra_chunk_scores(
        query, key, decays, bonus, count, no_decay=log_decay is None
    )  # [batch chunks heads size size]
    within = batched_matmul(scores.astype(dtype), value)
    through, written = _compute_chunk_states(key, value, decays, count)
    after, before = lax.scan(_pass_state, initial, (through.swapaxes(0, 1), written.swapaxes(0, 1)))
    before = before.swapaxes(0, 1)  # [batch chunks heads key_dim value_dim]
    unbroken = (count == 0)[..., None]
    if decays.ndim == 5:
        reach = jnp.where(unbroken, decay_from_start(decays, exclusive=bonus is not None), 0)
        carried = batched_matmul((query * reach).astype(query.dtype), before.astype(query.dtype))
    else:
        reach = jnp.where(unbroken, decay_from_start(decays[..., None]), 0)
        carried = reach * _split_head_groups(
            batched_matmul(query, _merge_head_groups(before, group).astype(query.dtype)), group
        )
    return join_chunks((scale * (within + carried)).astype(dtype), seq), after


def affine_gated_linear(
    key: Float[Array, "batch seq groups key_dim"],
    value: Float[Array, "batch seq heads value_dim"],
    log_decay: _Decay | None = None,
    *,
    segment_ids: Int[Array, "batch seq"] | None = None,
    chunk_size: int = _CHUNK_SIZE,
) -> _DiagonalAffineMap:
    """What these tokens do to any state before them; the first token's segment goes on from before."""
    _heads_per_group(key, value, log_decay)
    seq = value.shape[1]
    _, key, value, decays, _, state = _prepare_gated_operands(key, key, value, log_decay, None, None)
    key, value, decays = (split_into_chunks(x, chunk_size) for x in (key, value, decays))
    through, written = _compute_chunk_states(
        key, value, decays, count_segment_starts(segment_ids, seq, chunk_size)[:, :, None]
    )
    state, _ = lax.scan(_pass_state, state, (through.swapaxes(0, 1), written.swapaxes(0, 1)))
    factor = through.prod(1)
    return _DiagonalAffineMap(factor if decays.ndim == 5 else factor[..., 0], state)


def _heads_per_group(query: Array, value: Array, log_decay: Array | None) -> int:
    """How many value heads share a query head. **Raises** `ValueError` where that cannot be."""
    groups, heads = query.shape[2], value.shape[2]
    if heads % groups:
        raise ValueError(f"gated: {heads} heads of values do not share out over {groups} heads of queries and keys")
    if heads != groups and log_decay is not None and log_decay.ndim == 4:
        raise ValueError(
            f"gated: {heads} heads of values share {groups} heads of keys, whose decays are vectors: such a decay is "
            "that of one key head. Repeat queries and keys."
        )
    return heads // groups


def _prepare_gated_operands(query, key, value, log_decay, bonus, state) -> tuple[Any, ...]:
    """Every array varying over the same mesh axes; decays and states written out, in float32."""
    if log_decay is None:
        log_decay = jnp.zeros(value.shape[:3], jnp.float32)
    if state is None:
        state = jnp.zeros((len(value), value.shape[2], key.shape[3], value.shape[3]), jnp.float32)
    given = (query, key, value, log_decay.astype(jnp.float32), bonus, state.astype(jnp.float32))
    return vary(given, frozenset().union(*(varying(x) for x in given if x is not None)))


def _compute_intra_chunk_scores(
    query: Float[Array, "batch chunks groups size key_dim"],
    key: Float[Array, "batch chunks groups size key_dim"],
    log_decay: Float[Array, "batch chunks heads size *key_dim"],
    bonus: Float[Array, "heads key_dim"] | None,
    count: Int[Array, "_ chunks 1 size"],
    *,
    no_decay: bool,
) -> Float[Array, "batch chunks heads size size"]:
    """What each token takes of each one of its chunk. `constant`: nothing decays, and decays are all zero."""
    before = bonus is not None
    if log_decay.ndim == 5:
        scores = decayed_product(query, key, log_decay, exclusive=before)
    else:
        scores = jnp.repeat(batched_matmul(query, key.mT), log_decay.shape[2] // query.shape[2], axis=2)
        seen = causal_mask(query.shape[-2], strict=before)
        scores = jnp.where(seen, scores, 0) if no_decay else scores * exp_segsum(log_decay, exclusive=before)
    scores = jnp.where(count[..., :, None] == count[..., None, :], scores, 0)
    if bonus is None:
        return scores
    present = (query.astype(jnp.float32) * key * bonus[:, None, :]).sum(-1)
    return scores + jnp.where(jnp.eye(query.shape[-2], dtype=bool), present[..., None], 0)


def _compute_chunk_states(
    key: Float[Array, "batch chunks groups size key_dim"],
    value: Float[Array, "batch chunks heads size value_dim"],
    log_decay: Float[Array, "batch chunks heads size *key_dim"],
    count: Int[Array, "_ chunks 1 size"],
) -> tuple[Float[Array, "batch chunks heads _"], Float[Array, "batch chunks heads key_dim value_dim"]]:
    """Of each chunk, what is left of the state before it, and what its tokens add."""
    staying = (count == count[..., -1:])[..., None]
    decay = log_decay if log_decay.ndim == 5 else log_decay[..., None]
    left = jnp.where(staying, decay_to_end(decay), 0)
    through = jnp.where(count[..., -1:] == 0, jnp.exp(decay.sum(-2)), 0)
    if log_decay.ndim == 5:
        return through, batched_matmul((key * left).astype(key.dtype).mT, value)
    group = value.shape[2] // key.shape[2]
    return through, _split_head_groups(
        batched_matmul(key.mT, _merge_head_groups((value * left).astype(value.dtype), group)), group
    )


def _pass_state(
    state: MatrixState, chunk: tuple[Float[Array, "batch heads _"], MatrixState]
) -> tuple[MatrixState, MatrixState]:
    """The state after a chunk, and before it."""
    through, written = chunk
    return through[..., None] * state + written, state


def _merge_head_groups(
    x: Float[Array, "batch chunks heads rows dim"], group: int
) -> Float[Array, "batch chunks groups rows _"]:
    """The heads that share one of the keys, side by side in the last dim: one product for all of them."""
    if group == 1:
        return x
    batch, chunks, heads, rows, dim = x.shape
    x = x.reshape(batch, chunks, heads // group, group, rows, dim)
    return x.swapaxes(3, 4).reshape(batch, chunks, heads // group, rows, group * dim)


def _split_head_groups(
    x: Float[Array, "batch chunks groups rows _"], group: int
) -> Float[Array, "batch chunks heads rows dim"]:
    """`beside`, undone."""
    if group == 1:
        return x
    batch, chunks, groups, rows, wide = x.shape
    x = x.reshape(batch, chunks, groups, rows, group, wide // group)
    return x.swapaxes(3, 4).reshape(batch, chunks, groups * group, rows, wide // group)
