"""Kernels of `pallas_gated_linear`: one chunk of one head, forward and backward, in the notation of `gated_linear`.

With one decay per head the backward pass is written out. The cotangents of each product are two products, and the
cotangent of each decay times the decay, E, goes to `pull_back_decays`. With one decay per key channel it is the
pullback of the forward pass, which JAX derives inside the kernel.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ._gated_linear_operands import GatedOperands
from .common import Pairs, ScalarDecays, compute_decays, multiply, pull_back_decays, to_column

_Keys = Float[Array, "size key_dim"]
_RowValues = Float[Array, "size value_dim"]
_State = Float[Array, "key_dim value_dim"]
_Channels = Float[Array, "1 key_dim"]


class GatedGradients(NamedTuple):
    """Cotangents of a chunk's operands."""

    query: Any
    key: Any
    value: Any
    log_decay: Any
    bonus: Any
    state: Any


def forward_kernel(
    refs: GatedOperands, output_ref: Any, last_ref: Any, *state_refs: Any, scale: float, per_channel: bool
) -> None:
    """Compute the output of a chunk and the state after it, which stays in `last_ref` from chunk to chunk.

    `state_refs`, if any, receives the state before the chunk.
    """
    head = pl.program_id(3)

    @pl.when(pl.program_id(2) == 0)
    def _start() -> None:
        last_ref[head] = refs.state[head]

    operands = _load(refs, last_ref[head])
    if state_refs:
        state_refs[0][...] = operands.state
    run_chunk = _run_channel_chunk if per_channel else _run_head_chunk
    output, last = run_chunk(operands, scale=scale)
    output_ref[...] = output.astype(output_ref.dtype)
    last_ref[head] = last


def backward_kernel(
    refs: GatedOperands,
    grad_output_ref: Any,
    grad_last_ref: Any,
    grad_refs: GatedGradients,
    *,
    scale: float,
    per_channel: bool,
) -> None:
    """Compute the cotangents of a chunk's operands.

    The cotangents of the state and of the bonus stay in their blocks from the last chunk to the first; the cotangents
    of queries and keys are summed over the heads of the block.
    """
    step = pl.program_id(2)
    head = pl.program_id(3)

    @pl.when(step == 0)
    def _start() -> None:
        grad_refs.state[head] = grad_last_ref[head]
        if grad_refs.bonus is not None:
            grad_refs.bonus[...] = jnp.zeros_like(grad_refs.bonus)

    @pl.when(head == 0)
    def _clear() -> None:
        grad_refs.query[...] = jnp.zeros_like(grad_refs.query)
        grad_refs.key[...] = jnp.zeros_like(grad_refs.key)

    run_backward = _run_channel_backward if per_channel else _run_head_backward
    grad_output = grad_output_ref[...].astype(jnp.float32)
    gradients = run_backward(_load(refs, refs.state[...]), grad_output, grad_refs.state[head], scale=scale)
    grad_refs.query[...] += gradients.query.astype(grad_refs.query.dtype)
    grad_refs.key[...] += gradients.key.astype(grad_refs.key.dtype)
    grad_refs.value[...] = gradients.value.astype(grad_refs.value.dtype)
    grad_refs.log_decay[...] = gradients.log_decay
    grad_refs.state[head] = gradients.state
    if grad_refs.bonus is not None:
        grad_refs.bonus[...] += gradients.bonus


def _load(refs: GatedOperands, state: _State) -> GatedOperands:
    """Load the operands of a chunk from their blocks, with `state` before it."""
    return jax.tree.map(lambda ref: ref[...], refs._replace(state=None))._replace(state=state)


def _run_head_chunk(operands: GatedOperands, *, scale: float) -> tuple[_RowValues, _State]:
    """Compute the outputs of a chunk, and the state after it, with one decay per head."""
    query, key, value, log_decay, count, _, state = operands
    dtype = value.dtype
    decays = compute_decays(log_decay, count)
    scores = multiply(query, key, transpose_y=True) * decays.pairs
    output = decays.from_start * multiply(query, state.astype(dtype)) + multiply(scores.astype(dtype), value)
    update = multiply(key, (decays.to_end * value).astype(dtype), transpose_x=True)
    return scale * output, decays.total * state + update


def _run_head_backward(
    operands: GatedOperands, grad_output: _RowValues, grad_last: _State, *, scale: float
) -> GatedGradients:
    """Pull the cotangents of the outputs and of the state after the chunk back through `_run_head_chunk`."""
    query, key, value, log_decay, count, _, state = operands
    dtype = value.dtype
    decays = compute_decays(log_decay, count)
    scores = multiply(query, key, transpose_y=True) * decays.pairs
    grad_output = scale * grad_output
    rounded_last = grad_last.astype(dtype)
    rounded_output = grad_output.astype(dtype)
    grad_reads = (decays.from_start * grad_output).astype(dtype)
    decayed = (decays.to_end * value).astype(dtype)

    grad_decayed_scores = multiply(rounded_output, value, transpose_y=True)
    grad_scores = (grad_decayed_scores * decays.pairs).astype(dtype)
    query_from_state = multiply(grad_reads, state.astype(dtype), transpose_y=True)
    key_from_state = multiply(decayed, rounded_last, transpose_y=True)
    value_from_state = decays.to_end * multiply(key, rounded_last)
    exponents = ScalarDecays(
        grad_decayed_scores * scores,
        (query_from_state * query).sum(1, keepdims=True),
        (key_from_state * key).sum(1, keepdims=True),
        (decays.total * grad_last * state).sum(1, keepdims=True).sum(0, keepdims=True),
    )
    return GatedGradients(
        multiply(grad_scores, key) + query_from_state,
        multiply(grad_scores, query, transpose_x=True) + key_from_state,
        multiply(scores.astype(dtype), rounded_output, transpose_x=True) + value_from_state,
        pull_back_decays(exponents),
        None,
        decays.total * grad_last + multiply(query, grad_reads, transpose_x=True),
    )


def _run_channel_chunk(operands: GatedOperands, *, scale: float) -> tuple[_RowValues, _State]:
    """Compute the outputs of a chunk, and the state after it, with one decay per key channel."""
    query, key, value, log_decay, count, bonus, state = operands
    dtype = value.dtype
    count_column = to_column(count)
    last = count.max(1, keepdims=True)
    scores, from_start, to_end = _compute_channel_scores(query, key, log_decay, bonus)
    scores = jnp.where(count_column == count, scores, 0)
    reads = jnp.where(count_column == 0, query * jnp.exp(from_start), 0).astype(dtype)
    output: Any = _product(reads, state.astype(dtype))
    output += _product(scores.astype(dtype), value)
    decayed = jnp.where(count_column == last, key * jnp.exp(to_end), 0).astype(dtype)
    total = jnp.where(last == 0, jnp.exp(log_decay.sum(0, keepdims=True)), 0)
    return scale * output, to_column(total) * state + _product(decayed, value, transpose_x=True)


def _run_channel_backward(
    operands: GatedOperands, grad_output: _RowValues, grad_last: _State, *, scale: float
) -> GatedGradients:
    """Pull the cotangents of the outputs and of the state after the chunk back through `_run_channel_chunk`."""

    def run(gradients: GatedGradients) -> tuple[_RowValues, _State]:
        return _run_channel_chunk(operands._replace(**gradients._asdict()), scale=scale)

    primals = GatedGradients(**{name: getattr(operands, name) for name in GatedGradients._fields})
    _, pull_back = jax.vjp(run, primals)
    return pull_back((grad_output, grad_last))[0]


def _compute_channel_scores(
    query: _Keys, key: _Keys, log_decay: _Keys, bonus: _Channels | None
) -> tuple[Pairs, _Keys, _Keys]:
    """Compute the decayed causal scores of a chunk, and the log decays from its start to a read and from a write to its
    end. With a bonus a row reads before its own step's decay, and the bonus weights its own key.

    As in `chunks.decayed_product`, a pair of tokens meets in the two halves of a block of 2, 4, ... tokens, and its
    decay is the decay from the middle to the row times the decay from the column to the middle. Each level is one
    product of all rows and columns, from which a mask selects the blocks. The sums from the start of a half to a token,
    and from it to the end, double from level to level; none is subtracted.
    """
    size = len(log_decay)
    dtype = query.dtype
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), dim) for dim in (0, 1))
    token = lax.broadcasted_iota(jnp.int32, log_decay.shape, 0)
    own = query.astype(jnp.float32) * key if bonus is None else query * bonus * key
    scores = jnp.where(row == column, own.sum(1, keepdims=True), 0)
    before = after = jnp.zeros_like(log_decay)  # from the start of the half, and to its end, without the token's own
    half = 1
    while half < size:
        reads = before + log_decay if bonus is None else before
        rows = (query * jnp.exp(reads)).astype(dtype)
        columns = (key * jnp.exp(after)).astype(dtype)
        meet = (row > column) & ((row ^ column) >= half) & ((row ^ column) < 2 * half)
        scores += jnp.where(meet, _product(rows, columns, transpose_y=True), 0)
        total = before + log_decay + after
        is_later = token & half != 0
        before += jnp.where(is_later, _roll(total, half), 0)
        after += jnp.where(is_later, 0, _roll(total, size - half))
        half *= 2
    reads = before + log_decay if bonus is None else before
    return scores, reads, after


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(
    x: Float[Array, "_ _"], y: Float[Array, "_ _"], transpose_x: bool = False, transpose_y: bool = False
) -> Float[Array, "_ _"]:
    """Multiply as `multiply`, with cotangents rounded to the dtype of the operands before their products and after."""
    return multiply(x, y, transpose_x=transpose_x, transpose_y=transpose_y)


def _product_fwd(x: Array, y: Array, transpose_x: bool, transpose_y: bool) -> tuple[Array, tuple[Array, Array]]:
    """Return the product, and the operands as residuals."""
    return multiply(x, y, transpose_x=transpose_x, transpose_y=transpose_y), (x, y)


def _product_bwd(transpose_x: bool, transpose_y: bool, residuals: tuple, gradient: Array) -> tuple[Array, Array]:
    """Return both cotangents, products whose results need no transpose."""
    x, y = residuals
    gradient = gradient.astype(x.dtype)
    if transpose_x:
        grad_x = multiply(y, gradient, transpose_x=transpose_y, transpose_y=True)
    else:
        grad_x = multiply(gradient, y, transpose_y=not transpose_y)
    if transpose_y:
        grad_y = multiply(gradient, x, transpose_x=True, transpose_y=transpose_x)
    else:
        grad_y = multiply(x, gradient, transpose_x=not transpose_x)
    return grad_x.astype(x.dtype), grad_y.astype(y.dtype)


_product.defvjp(_product_fwd, _product_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _roll(x: _Keys, shift: int) -> _Keys:
    """Rotate the rows down by `shift`."""
    return pltpu.roll(x, shift, 0)


def _roll_fwd(x: _Keys, shift: int) -> tuple[_Keys, None]:
    """Return the rotated rows. There are no residuals."""
    return pltpu.roll(x, shift, 0), None


def _roll_bwd(shift: int, _: None, gradient: _Keys) -> tuple[_Keys]:
    """Rotate back."""
    return (pltpu.roll(gradient, len(gradient) - shift, 0),)


_roll.defvjp(_roll_fwd, _roll_bwd)
