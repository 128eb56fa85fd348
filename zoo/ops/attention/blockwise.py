"""Attention that never materializes the scores: block by block, with a running log-sum-exp and its own backward pass.

FlashAttention-2 (Dao, arXiv:2307.08691, algorithms 1 and 2; the running maximum: Milakov and Gimelshein,
arXiv:1805.02867). With s = soft_cap * tanh(scale * query . key / soft_cap), a block of queries visits blocks of keys
and carries the highest score m, the total l and the sum a:

    m' = max(m, max(s)),    p = exp(s - m'),    l' = exp(m - m') l + sum(p),    a' = exp(m - m') a + sum(p v)

from m = -inf, l = 0, a = 0; with a sink of score z from m = z, l = 1. At the end o = a / l, and the log-sum-exp is
L = m + log(l). The backward pass keeps q, k, v, o and L, and computes the scores again. With the cotangents do of o and
dL of L:

    D  = sum(do * o) - dL                              one number per query and head
    p  = exp(s - L)
    ds = p * (do . v - D) * (1 - (s / soft_cap)**2)    the last factor only with a soft cap
    dq = scale * sum(ds k),    dk = scale * sum(ds q),    dv = sum(p do),    dz = -sum(exp(z - L) D)

Sums c of log decays add c_q - c_k to s after the cap: of queries dc = sum(ds), of keys dc = -sum(ds), both without the
last factor.

The forward pass has two products of n queries, T keys and d features, 4 n T d FLOPs per head, the backward pass five,
10 n T d; causality halves both. Blocks without a key to see are not visited: above the diagonal, outside a window (its
cost is linear in length), in other segments, in empty slots of a KV cache. Temporaries are linear in length.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float

from zoo.ops.custom_vjps import refuse_forward_mode, refuse_reverse_over_reverse
from zoo.ops.matmul import einsum_round_once
from zoo.ops.normalization import max_last_dim, sum_last_dim
from zoo.ops.platform import current_platform
from zoo.ops.varying import align_varying

from .blocks import Marks, balance_blocks, find_ranges, mark_blocks, mask_blocks
from .decays import append_decay_gradient, split_decay_sums, subtract_decay_sums
from .grouped import group_size
from .mask import MASK_VALUE, AttentionMask

LARGEST_BLOCK = 512
"""Most queries, and keys, of a block. On CPUs, products of fewer do not use all cores (measured: two); elsewhere tiles
of this size fill the matrix units."""
SMALLEST_BLOCK = 128
"""Fewest of them, for a short window: smaller ones are slow."""

_HALVINGS = 4
"""Halvings of the scores of 512 keys on a CPU, before their maximum and sum over 32."""
_NO_SCORE = MASK_VALUE / 2
"""Log-sum-exp of no scores: so far above the score of a masked key that its weight is zero, and finite, so that a merge
with other keys is finite."""
_REFUSED = ("blockwise attention", 'set attention="grouped", as zoo.twice_differentiable(model) does')

_Queries = Float[Array, "query_blocks rows _"]
_Keys = Float[Array, "key_blocks keys _"]
_Decays = tuple[Float[Array, "*query_blocks rows 2"], Float[Array, "*key_blocks keys 2"]]
"""Sums of log decays of queries and of keys."""

_SEQUENCE = "batch (blocks size) (kv_heads group) dim"
_IN_BLOCKS = "batch kv_heads blocks (group size) dim"
"""Rows of a block: the query heads of a key head, each with `size` tokens."""


@dataclasses.dataclass(frozen=True)
class _Options:
    """Static arguments of both passes."""

    causal: bool
    window: int | None
    scale: float
    soft_cap: float | None
    sizes: tuple[int, int]
    """Tokens of a block of queries, and of one of keys."""
    decay_channels: bool

    def score(
        self,
        query: Float[Array, "rows dim"],
        key: Float[Array, "keys dim"],
        queries: Marks,
        keys: Marks,
        decays: _Decays | None,
    ) -> tuple[Float[Array, "rows keys"], Any]:
        """Return the scores of one pair of blocks, and their derivative by the scores without a cap, or 1."""
        scores = _multiply("rd,kd->rk", query, key) * self.scale
        slope = 1
        if self.soft_cap is not None:
            capped = jnp.tanh(scores / self.soft_cap)
            scores = self.soft_cap * capped
            slope = 1 - jnp.square(capped)
        if decays is not None:
            scores = scores + subtract_decay_sums(*decays)
        mask = mask_blocks(self.causal, self.window, queries, keys)
        by_head = scores.reshape(-1, *mask.shape)
        return jnp.where(mask, by_head, MASK_VALUE).reshape(scores.shape), slope


def blockwise_attention(
    query: Float[Array, "batch query_seq heads head_dim"],
    key: Float[Array, "batch key_seq kv_heads head_dim"],
    value: Float[Array, "batch key_seq kv_heads value_dim"],
    attention_mask: AttentionMask,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    decay_channels: bool = False,
    block: int | None = None,
) -> Float[Array, "batch query_seq heads value_dim"]:
    """Compute attention block by block: the form for long sequences, in plain JAX on every platform.

    `block` is the number of queries, and of keys, that are multiplied at a time; `choose_block` has the default. There
    is a gradient and its derivative forward over reverse, but no forward-mode derivative (a custom VJP), and none
    reverse over reverse.
    """
    options = {"scale": scale, "soft_cap": soft_cap, "sinks": sinks, "decay_channels": decay_channels, "block": block}
    return blockwise_attention_with_lse(query, key, value, attention_mask, **options)[0]


def blockwise_attention_with_lse(
    query: Float[Array, "batch query_seq heads head_dim"],
    key: Float[Array, "batch key_seq kv_heads head_dim"],
    value: Float[Array, "batch key_seq kv_heads value_dim"],
    attention_mask: AttentionMask,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    decay_channels: bool = False,
    block: int | None = None,
) -> tuple[Float[Array, "batch query_seq heads value_dim"], Float[Array, "batch query_seq heads"]]:
    """Compute attention, and the log-sum-exp of the scores (sinks included) in float32, both with a gradient.

    Outputs over two sets of keys, computed without sinks, merge with the weights exp(lse - logaddexp(lse, other_lse)).
    The log-sum-exp of a fully masked query is -5e29.
    """
    options, marks = _plan(query, key, attention_mask, scale, soft_cap, decay_channels, block)
    query, key, value, sinks = refuse_forward_mode((query, key, value, sinks), *_REFUSED)
    return _attend(options, *align_varying(query, key, value, sinks, marks))


def blockwise_attention_gradients(
    query: Float[Array, "batch query_seq heads head_dim"],
    key: Float[Array, "batch key_seq kv_heads head_dim"],
    value: Float[Array, "batch key_seq kv_heads value_dim"],
    attention_mask: AttentionMask,
    gradient: Float[Array, "batch query_seq heads value_dim"],
    lse: Float[Array, "batch query_seq heads"],
    total: Float[Array, "batch query_seq heads"],
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    decay_channels: bool = False,
    block: int | None = None,
) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
    """Compute the gradients of queries, keys and values in float32, from the gradient of the output, `lse` L and
    `total` D.

    `key` and `value` may be a part of the keys and values that L and D are over, as in ring attention. The gradients of
    queries are then the contributions of this part, to be summed over the parts.
    """
    options, marks = _plan(query, key, attention_mask, scale, soft_cap, decay_channels, block)
    return _differentiate(options, *align_varying(query, key, value, gradient, lse, total, marks))


def _plan(
    query: Array,
    key: Array,
    mask: AttentionMask,
    scale: float | None,
    soft_cap: float | None,
    decay_channels: bool,
    block: int | None,
) -> tuple[_Options, tuple[Marks, Marks]]:
    """Return the static arguments of both passes, and the marks of queries and keys. **Raises** `ValueError` for a mask
    with a selection of keys."""
    group_size(query, key)
    if mask.selected is not None:
        raise ValueError(
            "blockwise_attention masks blocks by positions and segments, and here queries select their keys. Use "
            "grouped_query_attention."
        )
    if block is None:
        block = choose_block(mask.window)
    sizes = balance_blocks(query.shape[1], block), balance_blocks(key.shape[1], block)
    marks = mark_blocks(mask, query.shape[0], (query.shape[1], key.shape[1]), sizes)
    features, _ = split_decay_sums(query, decay_channels)
    scale_or_default = features.shape[-1] ** -0.5 if scale is None else scale
    return _Options(mask.causal, mask.window, scale_or_default, soft_cap, sizes, decay_channels), marks


def choose_block(window: int | None) -> int:
    """Return the number of queries, and of keys, of a block: half a window, since larger ones are mostly masked."""
    if window is None:
        return LARGEST_BLOCK
    return min(max(window // 2, SMALLEST_BLOCK), LARGEST_BLOCK)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    options: _Options, query: Array, key: Array, value: Array, sinks: Array | None, marks: tuple[Marks, Marks]
) -> tuple[Array, Array]:
    """Compute the output and the log-sum-exp of operands that vary over the same mesh axes."""
    return _attend_fwd(options, query, key, value, sinks, marks)[0]


def _attend_fwd(
    options: _Options, query: Array, key: Array, value: Array, sinks: Array | None, marks: tuple[Marks, Marks]
) -> tuple[tuple[Array, Array], tuple]:
    """Return the output and the log-sum-exp, and the residuals."""
    batch, query_seq, heads, _ = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    query_size, key_size = options.sizes
    sink = jnp.full(heads, -jnp.inf) if sinks is None else sinks.astype(jnp.float32)
    start = jnp.repeat(sink.reshape(kv_heads, group), query_size, axis=1)[..., None]
    (query_features, key_features), decays = _split_decays(options, query, key)
    blocks = (
        _split(query_features, kv_heads, query_size),
        *(_split(x, kv_heads, key_size) for x in (key_features, value)),
        jnp.broadcast_to(start, (batch, *start.shape)),
        decays,
    )
    ranges = find_ranges(options.causal, options.window, *marks)
    found = _map_heads(functools.partial(_attend_head, options), ranges, marks, blocks)
    output, lse = (_join(x, query_size, query_seq) for x in found)
    output = output.astype(value.dtype)
    lse = lse[..., 0]
    return (output, lse), (query, key, value, sinks, marks, output, lse)


def _attend_bwd(options: _Options, residuals: tuple, cotangents: tuple[Array, Array]) -> tuple:
    """Return the cotangents of queries, keys, values and sinks."""
    query, key, value, sinks, marks, output, lse = residuals
    gradient, lse_gradient = cotangents
    total = (gradient.astype(jnp.float32) * output.astype(jnp.float32)).sum(-1) - lse_gradient  # D
    gradients = _differentiate(options, query, key, value, gradient, lse, total, marks)
    gradients = [x.astype(y.dtype) for x, y in zip(gradients, (query, key, value), strict=True)]
    if sinks is not None:
        sinks = -(jnp.exp(sinks.astype(jnp.float32) - lse) * total).sum((0, 1)).astype(sinks.dtype)
    return *refuse_reverse_over_reverse((*gradients, sinks), *_REFUSED), None


def _differentiate(
    options: _Options, query: Array, key: Array, value: Array, gradient: Array, lse: Array, total: Array, marks: Any
) -> tuple[Array, Array, Array]:
    """Return the cotangents of queries, keys and values in float32."""
    query_size, key_size = options.sizes
    kv_heads = key.shape[2]
    (query_features, key_features), decays = _split_decays(options, query, key)
    blocks = (
        _split(query_features, kv_heads, query_size),
        *(_split(x, kv_heads, key_size) for x in (key_features, value)),
        *(_split(x, kv_heads, query_size) for x in (gradient, lse[..., None], total[..., None])),
        decays,
    )
    ranges = find_ranges(options.causal, options.window, *marks, of_keys=True)
    found = _map_heads(functools.partial(_differentiate_head, options), ranges, marks, blocks)
    sizes = (query_size, query.shape[1]), (key_size, key.shape[1]), (key_size, key.shape[1])
    query_gradient, key_gradient, value_gradient = (_join(x, *size) for x, size in zip(found, sizes, strict=True))
    return query_gradient, key_gradient, value_gradient


_attend.defvjp(_attend_fwd, _attend_bwd)


def _map_heads(
    function: Callable, ranges: tuple[Array, Array], marks: tuple[Marks, Marks], arrays: tuple[Any, ...]
) -> tuple[Array, ...]:
    """Map a function of ranges, marks and the blocks of one key head over [batch, kv_heads].

    Heads run one after the other on a CPU: the products are then plain matrix products, and the blocks stay in its
    caches.
    """
    if current_platform() == "cpu":

        def scan_heads(row: tuple) -> tuple[Array, ...]:
            ranges, marks, arrays = row
            return lax.map(lambda head: function(ranges, marks, *head), arrays)

        return lax.map(scan_heads, (ranges, marks, arrays))
    ranges = ranges[0].min(0), ranges[1].max(0)

    def map_heads(marks: tuple[Marks, Marks], arrays: tuple[Any, ...]) -> tuple[Array, ...]:
        return jax.vmap(lambda *head: function(ranges, marks, *head))(*arrays)

    return jax.vmap(map_heads)(marks, arrays)


def _attend_head(
    options: _Options,
    ranges: tuple[Array, Array],
    marks: tuple[Marks, Marks],
    query: _Queries,
    key: _Keys,
    value: _Keys,
    start: Float[Array, "rows 1"],
    decays: _Decays | None,
) -> tuple[_Queries, _Queries]:
    """Return the output and the log-sum-exp of the queries of one key head."""

    def attend_block(block: tuple) -> tuple[Array, Array]:
        (first, end), queries, rows, row_sums = block

        def visit(index: Array, carry: tuple) -> tuple:
            highest, total, output = carry
            block_decays = None if decays is None else (row_sums, decays[1][index])
            scores, _ = options.score(rows, key[index], queries, _at(marks[1], index), block_decays)
            new = jnp.maximum(highest, max_last_dim(scores, halvings=_HALVINGS))
            kept = jnp.exp(highest - new)
            weights = jnp.exp(scores - new)
            total = kept * total + sum_last_dim(weights, halvings=_HALVINGS)
            return new, total, kept * output + _multiply("rk,kd->rd", weights.astype(value.dtype), value[index])

        highest = jnp.maximum(start, _NO_SCORE)
        empty = jnp.zeros((rows.shape[0], value.shape[-1]), jnp.float32)
        highest, total, output = lax.fori_loop(
            first, end, visit, align_varying((highest, jnp.exp(start - highest), empty), rows)[0]
        )
        total = jnp.where(total > 0, total, 1)
        return output / total, highest + jnp.log(total)

    return lax.map(attend_block, (ranges, marks[0], query, None if decays is None else decays[0]))


def _differentiate_head(
    options: _Options,
    ranges: tuple[Array, Array],
    marks: tuple[Marks, Marks],
    query: _Queries,
    key: _Keys,
    value: _Keys,
    gradient: _Queries,
    lse: _Queries,
    total: _Queries,
    decays: _Decays | None,
) -> tuple[_Queries, _Keys, _Keys]:
    """Return the cotangents of the queries, keys and values of one key head in float32."""

    def differentiate_block(query_gradients: tuple, block: tuple) -> tuple[tuple, tuple]:
        (first, end), keys, key_block, value_block, key_sums = block

        def visit(index: Array, carry: tuple) -> tuple:
            query_gradients, key_gradients, value_gradient = carry
            rows = query[index]
            outgoing = gradient[index]
            block_decays = None if decays is None else (decays[0][index], key_sums)
            scores, slope = options.score(rows, key_block, _at(marks[0], index), keys, block_decays)
            weights = jnp.exp(scores - lse[index])
            decay_gradient = weights * (_multiply("rd,kd->rk", outgoing, value_block) - total[index])
            score_gradient = (decay_gradient * slope).astype(key.dtype)
            of_query_sums = None
            of_key_sums = None
            if decays is not None:
                of_query_sums = decay_gradient.sum(1, keepdims=True)
                of_key_sums = -decay_gradient.sum(0)[:, None]
            more_for_queries = _multiply("rk,kd->rd", score_gradient, key_block), of_query_sums
            more_for_keys = _multiply("rk,rd->kd", score_gradient, rows), of_key_sums
            return (
                jax.tree.map(lambda x, more: _add_at(x, index, more), query_gradients, more_for_queries),
                jax.tree.map(jnp.add, key_gradients, more_for_keys),
                value_gradient + _multiply("rk,rd->kd", weights.astype(gradient.dtype), outgoing),
            )

        empty = _zeros_like(key_block, key_sums), jnp.zeros(value_block.shape, jnp.float32)
        query_gradients, *gradients = lax.fori_loop(
            first, end, visit, align_varying((query_gradients, *empty), key_block)[0]
        )
        return query_gradients, tuple(gradients)

    query_sums, key_sums = (None, None) if decays is None else decays
    empty, _ = align_varying(_zeros_like(query, query_sums), query)
    query_gradients, (key_gradients, value_gradient) = lax.scan(
        differentiate_block, empty, (ranges, marks[1], key, value, key_sums)
    )
    query_gradient, key_gradient = (
        append_decay_gradient(x * options.scale, of_sums) for x, of_sums in (query_gradients, key_gradients)
    )
    return query_gradient, key_gradient, value_gradient


def _zeros_like(x: Float[Array, "..."], sums: Float[Array, "..."] | None) -> tuple[Array, Array | None]:
    """Return zeros in float32 for the gradient of queries or keys, and of their sums of log decays if there are any."""
    zeros = jnp.zeros(x.shape, jnp.float32)
    if sums is None:
        return zeros, None
    return zeros, jnp.zeros((*sums.shape[:-1], 1), jnp.float32)


def _add_at(x: Float[Array, "blocks *dims"], index: Array, more: Float[Array, "*dims"]) -> Float[Array, "..."]:
    """Add `more` to one block."""
    return lax.dynamic_update_index_in_dim(x, x[index] + more, index, 0)


def _split_decays(options: _Options, query: Array, key: Array) -> tuple[tuple[Array, Array], _Decays | None]:
    """Return queries and keys without the channels of sums of log decays, and the blocks of these sums, if there are
    any. Queries that pad the last block have the sums of the last one: their weights stay finite."""
    query, query_sums = split_decay_sums(query, options.decay_channels)
    key, key_sums = split_decay_sums(key, options.decay_channels)
    if query_sums is None or key_sums is None:
        return (query, key), None
    query_size, key_size = options.sizes
    kv_heads = key.shape[2]
    decays = _split(query_sums, kv_heads, query_size, mode="edge"), _split(key_sums, kv_heads, key_size)
    return (query, key), decays


def _split(
    x: Float[Array, "batch seq heads dim"], kv_heads: int, size: int, mode: str = "constant"
) -> Float[Array, "..."]:
    """Split into blocks of `size` tokens, each with all heads of a key head, padded with zeros or by `mode`."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), (0, 0), (0, 0)), mode=mode)
    return rearrange(x, f"{_SEQUENCE} -> {_IN_BLOCKS}", kv_heads=kv_heads, size=size)


def _join(x: Float[Array, "..."], size: int, seq: int) -> Float[Array, "batch seq heads dim"]:
    """Join blocks of `size` tokens to a sequence of `seq` tokens."""
    return rearrange(x, f"{_IN_BLOCKS} -> {_SEQUENCE}", size=size)[:, :seq]


def _at(marks: Marks, index: Array) -> Marks:
    """Return the marks of one block."""
    return jax.tree.map(lambda x: x[index], marks)


def _multiply(spec: str, x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    """Compute an einsum of two matrices with a float32 result."""
    left, right, out = spec.replace("->", ",").split(",")
    return einsum_round_once(left, right, out, x, y, jnp.float32)
