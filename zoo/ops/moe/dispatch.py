"""Tokens to experts and back, by gathers alone.

Each token goes to `top` experts: of tokens * top visits every one becomes a row, and rows are sorted by expert, so that
an expert's are side by side. Coming back, a token takes its own rows and adds them up in the order in which its experts
were chosen. Both ways, and in both gradients, each number is fetched from one known place and sums have a fixed order:
the same bits at every run. A scatter that adds, the usual way back, has no such order on a GPU. Both ways have
gradients of their own, and so no forward-mode differentiation.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..varying import vary, varying


class _DispatchIndices(NamedTuple):
    """Where visits stand once they are sorted by expert. A visit is token * top + its place among the token's own."""

    assignments: Int[Array, "rows"]
    """The visit of each row."""
    row_indices: Int[Array, "tokens top"]
    """The row of each visit."""
    group_sizes: Int[Array, "experts"]
    """How many rows each expert has."""


def sort_by_expert(selected_experts: Int[Array, "tokens top"], experts: int) -> _DispatchIndices:
    """Rows by expert; those of one expert in the order of tokens."""
    flat, rows = selected_experts.reshape(-1), selected_experts.size
    if rows * experts < 2**31:
        # Expert and visit in one number: a sort of numbers alone, without what belongs to them, takes a fifth as long.
        both = lax.sort(flat.astype(jnp.int32) * rows + jnp.arange(rows, dtype=jnp.int32), is_stable=False)
        visits, ends = both % rows, jnp.searchsorted(both, jnp.arange(1, experts + 1, dtype=jnp.int32) * rows)
    else:
        visits = jnp.argsort(flat, stable=True)
        ends = jnp.searchsorted(flat[visits], jnp.arange(experts), side="right")
    places = jnp.zeros_like(visits).at[visits].set(jnp.arange(rows, dtype=visits.dtype), unique_indices=True)
    return _DispatchIndices(visits, places.reshape(selected_experts.shape), jnp.diff(ends, prepend=0).astype(jnp.int32))


def dispatch(x: Float[Array, "tokens embed"], indices: _DispatchIndices) -> Float[Array, "rows embed"]:
    """A token's vector for each of its visits, sorted by expert."""
    axes = varying(x) | varying(indices.assignments)
    return _gather_tokens(*vary((x, indices.assignments, indices.row_indices), axes))


def combine(
    rows: Float[Array, "rows embed"], weights: Float[Array, "tokens top"], indices: _DispatchIndices
) -> Float[Array, "tokens embed"]:
    """Of each token the sum of its rows, each times its weight: in float32, rounded to the rows' dtype."""
    axes = varying(rows) | varying(weights) | varying(indices.assignments)
    return _combine_rows(*vary((rows, weights, indices.assignments, indices.row_indices), axes))


@jax.custom_vjp
def _gather_tokens(
    x: Float[Array, "tokens embed"], assignments: Int[Array, "rows"], row_indices: Int[Array, "tokens top"]
) -> Array:
    """Rows in the order of visits."""
    return x[assignments // row_indices.shape[1]]


def _gather_tokens_fwd(x: Array, assignments: Array, row_indices: Array) -> tuple[Array, Array]:
    """The rows, and where each token's stand."""
    return _gather_tokens(x, assignments, row_indices), row_indices


def _gather_tokens_bwd(row_indices: Array, gradient: Array) -> tuple[Any, ...]:
    """A token's gradient is the sum of its rows'."""
    return _sum_in_choice_order(gradient, row_indices, None).astype(gradient.dtype), None, None


_gather_tokens.defvjp(_gather_tokens_fwd, _gather_tokens_bwd)


@jax.custom_vjp
def _combine_rows(rows: Array, weights: Array, assignments: Array, row_indices: Array) -> Float[Array, "tokens embed"]:
    """The weighted sum of each token's rows."""
    return _sum_in_choice_order(rows, row_indices, weights).astype(rows.dtype)


def _combine_rows_fwd(rows: Array, weights: Array, assignments: Array, row_indices: Array) -> tuple[Array, tuple]:
    """The sums, and what their gradient needs."""
    return _combine_rows(rows, weights, assignments, row_indices), (rows, weights, assignments, row_indices)


def _combine_rows_bwd(residuals: tuple, gradient: Array) -> tuple[Any, ...]:
    """A row's gradient is its token's times its weight; a weight's is the product of the two."""
    rows, weights, visits, places = residuals
    to_rows = gradient[visits // places.shape[1]] * weights.reshape(-1)[visits][:, None]
    along = [(rows[places[:, k]].astype(jnp.float32) * gradient).sum(-1) for k in range(places.shape[1])]
    return to_rows.astype(rows.dtype), jnp.stack(along, 1).astype(weights.dtype), None, None


_combine_rows.defvjp(_combine_rows_fwd, _combine_rows_bwd)


def _sum_in_choice_order(
    rows: Array, row_indices: Int[Array, "tokens top"], weights: Array | None
) -> Float[Array, "tokens embed"]:
    """Each token's rows, weighted where weights are given, added up one after another in float32."""
    total: Any = 0.0
    for k in range(row_indices.shape[1]):
        row = rows[row_indices[:, k]].astype(jnp.float32)
        total = total + (row if weights is None else row * weights[:, k : k + 1])
    return total


def sort_into_slots(
    selected_experts: Int[Array, "tokens top"], experts: int, capacity: int
) -> tuple[_DispatchIndices, Array]:
    """Each expert has `capacity` rows, one expert's after another's, and takes no more visits: all first choices go
    before any second one, earlier tokens before later. Which visits were taken comes beside (True).

    The order is that of one more token, which stands for none: its vector and its weights are zero, empty slots are its
    visits, and so is one row behind all slots, where visits stand that no expert took. Whoever combines gives these the
    weight 0. Source: GShard, arXiv 2006.16668, algorithm 1, without its random choice of second experts.
    """
    tokens, top = selected_experts.shape
    first_choices_first = selected_experts.T.reshape(-1)
    to_each = (first_choices_first[:, None] == jnp.arange(experts)).astype(jnp.int32)
    before = (jnp.cumsum(to_each, axis=0) - to_each)[jnp.arange(tokens * top), first_choices_first]
    before = before.reshape(top, tokens).T
    taken, behind = before < capacity, experts * capacity
    places = jnp.where(taken, selected_experts * capacity + before, behind)
    visits = jnp.full(behind + 1, tokens * top, places.dtype)
    visits = visits.at[jnp.where(taken, places, behind + 1)].set(
        jnp.arange(tokens * top).reshape(tokens, top), mode="drop"
    )
    nowhere = jnp.full((1, top), behind, places.dtype)
    sizes = jnp.full(experts, capacity, jnp.int32)
    return _DispatchIndices(visits, jnp.concatenate([places, nowhere]), sizes), taken
