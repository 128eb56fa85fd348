"""Expert dispatch and combine, implemented with gathers only.

Each token is assigned to `top` experts; every one of the tokens * top assignments becomes a row, and rows are sorted by
expert. To combine, a token gathers its rows and adds them in the order in which its experts were selected. Both passes
and both gradients use gathers and sums in a fixed order, so they are bitwise deterministic; a scatter-add, the usual
way to combine, is not on a GPU. Both are custom VJPs, without forward-mode differentiation.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..custom_vjps import refuse_forward_mode, run_in_rule
from ..implementations import always_holds
from ..varying import vary, varying


class _DispatchIndices(NamedTuple):
    """The permutation between assignments and rows sorted by expert. Assignment k of a token is token * top + k."""

    assignments: Int[Array, "rows"]
    """The assignment of each row."""
    row_indices: Int[Array, "tokens top"]
    """The row of each assignment."""
    group_sizes: Int[Array, "experts"]
    """The number of rows of each expert."""


def sort_by_expert(selected_experts: Int[Array, "tokens top"], experts: int) -> _DispatchIndices:
    """Sort assignments by expert, and by token for the same expert."""
    flat = selected_experts.reshape(-1)
    rows = selected_experts.size
    if always_holds(lambda: rows * experts < 2**31):
        # Expert and assignment packed into one integer: sorting keys without values takes a fifth of the time.
        packed = lax.sort(flat.astype(jnp.int32) * rows + jnp.arange(rows, dtype=jnp.int32), is_stable=False)
        assignments = packed % rows
        ends = jnp.searchsorted(packed, jnp.arange(1, experts + 1, dtype=jnp.int32) * rows)
    else:
        assignments = jnp.argsort(flat, stable=True)
        ends = jnp.cumsum(jnp.bincount(flat, length=experts))
    row_indices = jnp.zeros_like(assignments)
    row_indices = row_indices.at[assignments].set(jnp.arange(rows, dtype=assignments.dtype), unique_indices=True)
    group_sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)
    return _DispatchIndices(assignments, row_indices.reshape(selected_experts.shape), group_sizes)


def dispatch(x: Float[Array, "tokens embed"], indices: _DispatchIndices) -> Float[Array, "rows embed"]:
    """Gather each token's vector for each of its experts, sorted by expert."""
    x = refuse_forward_mode(x, "the dispatch of tokens to experts")
    axes = varying(x) | varying(indices.assignments)
    return _gather_tokens(*vary((x, indices.assignments, indices.row_indices), axes))


def combine(
    rows: Float[Array, "rows embed"], weights: Float[Array, "tokens top"], indices: _DispatchIndices
) -> Float[Array, "tokens embed"]:
    """Sum the rows of each token times their routing weights, in float32, rounded to the dtype of `rows`."""
    rows, weights = refuse_forward_mode((rows, weights), "the sum of a token's experts")
    axes = varying(rows) | varying(weights) | varying(indices.assignments)
    return _combine_rows(*vary((rows, weights, indices.assignments, indices.row_indices), axes))


@jax.custom_vjp
def _gather_tokens(
    x: Float[Array, "tokens embed"], assignments: Int[Array, "rows"], row_indices: Int[Array, "tokens top"]
) -> Array:
    """Return one row per assignment, sorted by expert."""
    return x[assignments // row_indices.shape[1]]


def _gather_tokens_fwd(x: Array, assignments: Array, row_indices: Array) -> tuple[Array, Array]:
    """Return the rows, and the row indices as residuals."""
    return run_in_rule(_gather_tokens, x, assignments, row_indices), row_indices


def _gather_tokens_bwd(row_indices: Array, gradient: Array) -> tuple[Any, ...]:
    """Sum the cotangents of each token's rows."""
    return _sum_in_choice_order(gradient, row_indices, None).astype(gradient.dtype), None, None


_gather_tokens.defvjp(_gather_tokens_fwd, _gather_tokens_bwd)


@jax.custom_vjp
def _combine_rows(rows: Array, weights: Array, assignments: Array, row_indices: Array) -> Float[Array, "tokens embed"]:
    """Return the weighted sum of each token's rows."""
    return _sum_in_choice_order(rows, row_indices, weights).astype(rows.dtype)


def _combine_rows_fwd(rows: Array, weights: Array, assignments: Array, row_indices: Array) -> tuple[Array, tuple]:
    """Return the sums, and all operands as residuals."""
    y = run_in_rule(_combine_rows, rows, weights, assignments, row_indices)
    return y, (rows, weights, assignments, row_indices)


def _combine_rows_bwd(residuals: tuple, gradient: Array) -> tuple[Any, ...]:
    """Return the cotangents: of a row, its token's times its weight; of a weight, the dot product of row and token."""
    rows, weights, assignments, row_indices = residuals
    top = row_indices.shape[1]
    grad_rows = gradient[assignments // top] * weights.reshape(-1)[assignments][:, None]
    grad_weights = [(rows[row_indices[:, k]].astype(jnp.float32) * gradient).sum(-1) for k in range(top)]
    return grad_rows.astype(rows.dtype), jnp.stack(grad_weights, 1).astype(weights.dtype), None, None


_combine_rows.defvjp(_combine_rows_fwd, _combine_rows_bwd)


def _sum_in_choice_order(
    rows: Array, row_indices: Int[Array, "tokens top"], weights: Array | None
) -> Float[Array, "tokens embed"]:
    """Add the rows of each token in float32 in the order of its experts, times their weights if given."""
    total: Any = 0.0
    for k in range(row_indices.shape[1]):
        row = rows[row_indices[:, k]].astype(jnp.float32)
        if weights is not None:
            row = row * weights[:, k : k + 1]
        total = total + row
    return total


def sort_into_slots(
    selected_experts: Int[Array, "tokens top"], experts: int, capacity: int
) -> tuple[_DispatchIndices, Array]:
    """Assign tokens to `capacity` slots per expert, first choices before second ones, earlier tokens first.

    Returns the indices, and a mask "tokens top" that is True for assignments that got a slot; the others are dropped.
    The indices contain one padding token more, whose vector and weights the caller sets to zero: empty slots are its
    assignments, and so is one row after all slots, the row of dropped assignments. Callers give these the weight 0.
    Source: GShard, arXiv 2006.16668, algorithm 1, without its random choice of second experts.
    """
    tokens, top = selected_experts.shape
    first_choices_first = selected_experts.T.reshape(-1)
    one_hot = (first_choices_first[:, None] == jnp.arange(experts)).astype(jnp.int32)
    slot = (jnp.cumsum(one_hot, axis=0) - one_hot)[jnp.arange(tokens * top), first_choices_first]
    slot = slot.reshape(top, tokens).T
    has_slot = slot < capacity
    padding_row = experts * capacity
    row_indices = jnp.where(has_slot, selected_experts * capacity + slot, padding_row)
    assignments = jnp.full(padding_row + 1, tokens * top, row_indices.dtype)
    assignments = assignments.at[jnp.where(has_slot, row_indices, padding_row + 1)].set(
        jnp.arange(tokens * top).reshape(tokens, top), mode="drop"
    )
    padding_token = jnp.full((1, top), padding_row, row_indices.dtype)
    group_sizes = jnp.full(experts, capacity, jnp.int32)
    return _DispatchIndices(assignments, jnp.concatenate([row_indices, padding_token]), group_sizes), has_slot
