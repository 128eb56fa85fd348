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
from zoo.ops.platform import current_platform
from zoo.ops.varying import align_varying

from .blocks import Marks, balance_blocks, find_ranges, mark_blocks, mask_blocks
from .grouped import group_size
from .mask import MASK_VALUE, AttentionMask

LARGEST_BLOCK = 512
"""Most queries, and keys, of a block. On CPUs, products of fewer do not use all cores (measured: two); elsewhere tiles
of this size fill the matrix units."""
SMALLEST_BLOCK = 128
"""Fewest of them, for a short window: smaller ones are slow."""

_NO_SCORE = MASK_VALUE / 2
"""Log-sum-exp of no scores: so far above the score of a masked key that its weight is zero, and finite, so that a merge
with other keys is finite."""
_REFUSED = ("blockwise attention", 'set attention="grouped", as zoo.twice_differentiable(model) does')

_Queries = Float[Array, "query_blocks rows _"]
_Keys = Float[Array, "key_blocks keys _"]

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

    def score(
        self, query: Float[Array, "rows dim"], key: Float[Array, "keys dim"], queries: Marks, keys: Marks
    ) -> tuple[Float[Array, "rows keys"], Any]:
        """Return the scores of one pair of blocks, and their derivative by the scores without a cap, or 1."""
        scores = _multiply("rd,kd->rk", query, key) * self.scale
        slope = 1
        if self.soft_cap is not None:
            capped = jnp.tanh(scores / self.soft_cap)
            scores = self.soft_cap * capped
            slope = 1 - jnp.square(capped)
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
    block: int | None = None,
) -> Float[Array, "batch query_seq heads value_dim"]:
    """Compute attention block by block: the form for long sequences, in plain JAX on every platform.

    `block` is the number of queries, and of keys, that are multiplied at a time; `choose_block` has the default. There
    is a gradient and its derivative forward over reverse, but no forward-mode derivative (a custom VJP), and none
    reverse over reverse.
    """
    output, _ = blockwise_attention_with_lse(
        query, key, value, attention_mask, scale=scale, soft_cap=soft_cap, sinks=sinks, block=block
    )
    return output


def blockwise_attention_with_lse(
    query: Float[Array, "batch query_seq heads head_dim"],
    key: Float[Array, "batch key_seq kv_heads head_dim"],
    value: Float[Array, "batch key_seq kv_heads value_dim"],
    attention_mask: AttentionMask,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    block: int | None = None,
) -> tuple[Float[Array, "batch query_seq heads value_dim"], Float[Array, "batch query_seq heads"]]:
    """Compute attention, and the log-sum-exp of the scores (sinks included) in float32, both with a gradient.

    Outputs over two sets of keys, computed without sinks, merge with the weights exp(lse - logaddexp(lse, other_lse)).
    The log-sum-exp of a fully masked query is -5e29.
    """
    options, marks = _plan(query, key, attention_mask, scale, soft_cap, block)
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
    block: int | None = None,
) -> tuple[Float[Array, "..."], Float[Array, "..."], Float[Array, "..."]]:
    """Compute the gradients of queries, keys and values in float32, from the gradient of the output, `lse` L and
    `total` D.

    `key` and `value` may be a part of the keys and values that L and D are over, as in ring attention. The gradients of
    queries are then the contributions of this part, to be summed over the parts.
    """
    options, marks = _plan(query, key, attention_mask, scale, soft_cap, block)
    return _differentiate(options, *align_varying(query, key, value, gradient, lse, total, marks))


def _plan(
    query: Array, key: Array, mask: AttentionMask, scale: float | None, soft_cap: float | None, block: int | None
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
    scale_or_default = query.shape[-1] ** -0.5 if scale is None else scale
    return _Options(mask.causal, mask.window, scale_or_default, soft_cap, sizes), marks


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
    blocks = (
        _split(query, kv_heads, query_size),
        *(_split(x, kv_heads, key_size) for x in (key, value)),
        jnp.broadcast_to(start, (batch, *start.shape)),
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
    blocks = (
        _split(query, kv_heads, query_size),
        *(_split(x, kv_heads, key_size) for x in (key, value)),
        *(_split(x, kv_heads, query_size) for x in (gradient, lse[..., None], total[..., None])),
    )
    ranges = find_ranges(options.causal, options.window, *marks, of_keys=True)
    found = _map_heads(functools.partial(_differentiate_head, options), ranges, marks, blocks)
    sizes = (query_size, query.shape[1]), (key_size, key.shape[1]), (key_size, key.shape[1])
    query_gradient, key_gradient, value_gradient = (_join(x, *size) for x, size in zip(found, sizes, strict=True))
    return query_gradient, key_gradient, value_gradient


_attend.defvjp(_attend_fwd, _attend_bwd)


def _map_heads(
    function: Callable, ranges: tuple[Array, Array], marks: tuple[Marks, Marks], arrays: tuple[Array, ...]
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

    def map_heads(marks: tuple[Marks, Marks], arrays: tuple[Array, ...]) -> tuple[Array, ...]:
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
) -> tuple[_Queries, _Queries]:
    """Return the output and the log-sum-exp of the queries of one key head."""

    def attend_block(block: tuple) -> tuple[Array, Array]:
        (first, end), queries, rows = block

        def visit(index: Array, carry: tuple) -> tuple:
            highest, total, output = carry
            scores, _ = options.score(rows, key[index], queries, _at(marks[1], index))
            new = jnp.maximum(highest, scores.max(-1, keepdims=True))
            kept = jnp.exp(highest - new)
            weights = jnp.exp(scores - new)
            total = kept * total + weights.sum(-1, keepdims=True)
            return new, total, kept * output + _multiply("rk,kd->rd", weights.astype(value.dtype), value[index])

        highest = jnp.maximum(start, _NO_SCORE)
        empty = jnp.zeros((rows.shape[0], value.shape[-1]), jnp.float32)
        highest, total, output = lax.fori_loop(
            first, end, visit, align_varying((highest, jnp.exp(start - highest), empty), rows)[0]
        )
        total = jnp.where(total > 0, total, 1)
        return output / total, highest + jnp.log(total)

    return lax.map(attend_block, (ranges, marks[0], query))


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
) -> tuple[_Queries, _Keys, _Keys]:
    """Return the cotangents of the queries, keys and values of one key head in float32."""

    def differentiate_block(query_gradient: Array, block: tuple) -> tuple[Array, tuple[Array, Array]]:
        (first, end), keys, key_block, value_block = block

        def visit(index: Array, carry: tuple) -> tuple:
            query_gradient, key_gradient, value_gradient = carry
            rows = query[index]
            outgoing = gradient[index]
            scores, slope = options.score(rows, key_block, _at(marks[0], index), keys)
            weights = jnp.exp(scores - lse[index])
            score_gradient = weights * (_multiply("rd,kd->rk", outgoing, value_block) - total[index]) * slope
            score_gradient = score_gradient.astype(key.dtype)
            more = query_gradient[index] + _multiply("rk,kd->rd", score_gradient, key_block)
            return (
                lax.dynamic_update_index_in_dim(query_gradient, more, index, 0),
                key_gradient + _multiply("rk,rd->kd", score_gradient, rows),
                value_gradient + _multiply("rk,rd->kd", weights.astype(gradient.dtype), outgoing),
            )

        empty = jnp.zeros(key_block.shape, jnp.float32), jnp.zeros(value_block.shape, jnp.float32)
        query_gradient, *gradients = lax.fori_loop(
            first, end, visit, align_varying((query_gradient, *empty), key_block)[0]
        )
        return query_gradient, tuple(gradients)

    empty, _ = align_varying(jnp.zeros(query.shape, jnp.float32), query)
    query_gradient, (key_gradient, value_gradient) = lax.scan(
        differentiate_block, empty, (ranges, marks[1], key, value)
    )
    return query_gradient * options.scale, key_gradient * options.scale, value_gradient


def _split(x: Float[Array, "batch seq heads dim"], kv_heads: int, size: int) -> Float[Array, "..."]:
    """Split into blocks of `size` tokens, each with all heads of a key head, padded with zeros."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), (0, 0), (0, 0)))
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
