"""Calls of the kernels of `pallas_gated_linear`: the custom VJP, the grid, and the blocks of arrays."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from ...custom_vjps import refuse_second_derivative
from ...varying import align_varying
from ._gated_linear_kernels import GatedGradients, backward_kernel, forward_kernel
from ._gated_linear_operands import GatedOperands
from .common import REFUSED, describe_output, runs_interpreted


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def apply_kernels(scale: float, share: int, operands: GatedOperands) -> tuple[Array, Array]:
    """Compute gated linear attention of whole chunks, in blocks of `share` heads: returns outputs and last states.

    All operands vary over the same mesh axes.
    """
    output, last = _run_forward(scale, share, operands, save=False)
    return output, last


def _apply_kernels_fwd(scale: float, share: int, operands: GatedOperands) -> tuple[tuple, GatedOperands]:
    """Return the outputs, and the operands with the states before the chunks as residuals."""
    operands = refuse_second_derivative(operands, *REFUSED)
    output, last, states = _run_forward(scale, share, operands, save=True)
    return (output, last), operands._replace(state=states)


def _apply_kernels_bwd(
    scale: float, share: int, operands: GatedOperands, gradients: tuple[Array, Array]
) -> tuple[GatedOperands]:
    """Run the backward kernel, chunks in reverse, and do the sums that the kernel does not: over head blocks and
    rows."""
    gradients = refuse_second_derivative(gradients, *REFUSED)
    operands, (grad_output, grad_last) = align_varying(operands, gradients)
    grid = _Grid(operands, share, is_reversed=True)
    query = operands.query
    bonus = operands.bonus
    shared = (len(query), grid.blocks, *query.shape[2:])
    sum_dtype = query.dtype if grid.group == 1 else jnp.float32
    partial_sum = jax.ShapeDtypeStruct(shared, sum_dtype)
    if bonus is None:
        per_row = None
        per_row_spec = None
    else:
        per_row = jax.ShapeDtypeStruct((len(query), *bonus.shape), jnp.float32)
        per_row_spec = grid.head(per_row)
    (found,) = grid.run(
        partial(backward_kernel, scale=scale, per_channel=grid.per_channel),
        (grid.describe_operands(operands, grid.chunk), grid.rows(grad_output), grid.block(grad_last)),
        (operands, grad_output, grad_last),
        (
            GatedGradients(
                grid.shared(partial_sum),
                grid.shared(partial_sum),
                grid.rows(operands.value),
                grid.decay(operands.log_decay),
                per_row_spec,
                grid.block(grad_last),
            ),
        ),
        (GatedGradients(partial_sum, partial_sum, operands.value, operands.log_decay, per_row, grad_last),),
        passes=3,
    )
    sum_blocks = lambda x: x.reshape(*query.shape[:2], -1, *query.shape[2:]).sum(2).astype(query.dtype)
    grad_bonus = None if bonus is None else found.bonus.sum(0)
    grad_query = sum_blocks(found.query)
    grad_key = sum_blocks(found.key)
    grad_count = jnp.zeros_like(operands.count)
    return (GatedOperands(grad_query, grad_key, found.value, found.log_decay, grad_count, grad_bonus, found.state),)


apply_kernels.defvjp(_apply_kernels_fwd, _apply_kernels_bwd)


def _run_forward(scale: float, share: int, operands: GatedOperands, *, save: bool) -> tuple:
    """Return the outputs and the last states, and to `save` them, the states before the chunks."""
    grid = _Grid(operands, share)
    state = operands.state
    states = jax.ShapeDtypeStruct((*state.shape[:2], grid.chunks, *state.shape[2:]), jnp.float32)
    return grid.run(
        partial(forward_kernel, scale=scale, per_channel=grid.per_channel),
        (grid.describe_operands(operands, grid.block),),
        (operands,),
        (grid.rows(operands.value), grid.block(state), *[grid.chunk(states)] * save),
        (operands.value, state, *[states] * save),
        passes=1,
    )


class _Grid:
    """The grid (batch, head blocks, chunks, heads of a block), and the blocks that arrays are read and written in."""

    def __init__(self, operands: GatedOperands, share: int, *, is_reversed: bool = False):
        self.batch, self.heads, _, self.value_dim = operands.value.shape
        _, self.chunks, _, self.size = operands.count.shape
        self.key_dim = operands.key.shape[3]
        self.per_channel = operands.log_decay.ndim == 4
        self.group = self.heads // operands.key.shape[1]
        self.share = share
        self.blocks = self.heads // share
        self.blocks_per_group = self.group // share
        self.is_reversed = is_reversed

    def _head(self, block: Any, index: Any) -> Any:
        """Return a head of a head block."""
        return block * self.share + index

    def _chunk(self, step: Any) -> Any:
        """Return the chunk of a step of the grid."""
        if self.is_reversed:
            return self.chunks - 1 - step
        return step

    def describe_operands(self, operands: GatedOperands, describe_state: Callable) -> GatedOperands:
        """Return the blocks of a kernel's operands."""
        keys = pl.BlockSpec(
            (None, None, self.size, self.key_dim),
            lambda b, block, n, h: (b, lax.div(block, self.blocks_per_group), self._chunk(n), 0),
        )

        def index_count(b: Any, block: Any, n: Any, h: Any) -> tuple[Any, ...]:
            row = 0 if len(operands.count) == 1 else b
            return row, self._chunk(n), 0, 0

        count = pl.BlockSpec((None, None, 1, self.size), index_count)
        bonus = None
        if operands.bonus is not None:
            bonus = pl.BlockSpec((None, 1, self.key_dim), lambda b, block, n, h: (self._head(block, h), 0, 0))
        return GatedOperands(
            keys,
            keys,
            self.rows(operands.value),
            self.decay(operands.log_decay),
            count,
            bonus,
            describe_state(operands.state),
        )

    def rows(self, x: Any) -> pl.BlockSpec:
        """Return the block of a chunk's rows in an array [batch, heads, seq, dim]."""
        shape = (None, None, self.size, x.shape[3])
        return pl.BlockSpec(shape, lambda b, block, n, h: (b, self._head(block, h), self._chunk(n), 0))

    def shared(self, x: Any) -> pl.BlockSpec:
        """Return the block of a chunk's rows in an array [batch, head blocks, seq, dim]."""
        shape = (None, None, self.size, x.shape[3])
        return pl.BlockSpec(shape, lambda b, block, n, h: (b, block, self._chunk(n), 0))

    def chunk(self, x: Any) -> pl.BlockSpec:
        """Return the block of a chunk's matrix in an array [batch, heads, chunks, rows, columns]."""
        shape = (None, None, None, *x.shape[3:])
        return pl.BlockSpec(shape, lambda b, block, n, h: (b, self._head(block, h), self._chunk(n), 0, 0))

    def decay(self, x: Any) -> pl.BlockSpec:
        """Return the block of a chunk's decays: rows if they are per key channel, otherwise a matrix of one row."""
        return self.rows(x) if self.per_channel else self.chunk(x)

    def head(self, x: Any) -> pl.BlockSpec:
        """Return the block of a head's matrix in an array [batch, heads, rows, columns], for head blocks of one
        head."""
        return pl.BlockSpec((None, None, *x.shape[2:]), lambda b, block, n, h: (b, self._head(block, h), 0, 0))

    def block(self, x: Any) -> pl.BlockSpec:
        """Return the block of a head block's matrices. It stays in memory from chunk to chunk."""
        return pl.BlockSpec((None, self.share, *x.shape[2:]), lambda b, block, n, h: (b, block, 0, 0))

    def run(self, kernel: Callable, in_specs: Any, operands: Any, out_specs: Any, outputs: Any, *, passes: int) -> Any:
        """Run a kernel over the grid; `outputs` have the shapes and dtypes of its results.

        It computes about `passes` times the FLOPs of the forward pass.
        """
        size = self.size
        levels = self.size.bit_length() - 1 if self.per_channel else 1
        per_token = 2 * size * (levels * self.key_dim + self.value_dim) + 4 * self.key_dim * self.value_dim
        exponentials = 2 * levels * self.key_dim if self.per_channel else size + 2
        tokens = self.batch * self.heads * self.chunks * size
        like = jax.tree.leaves(operands)[0]
        return pl.pallas_call(
            kernel,
            grid=(self.batch, self.blocks, self.chunks, self.share),
            in_specs=in_specs,
            out_specs=out_specs,
            out_shape=jax.tree.map(lambda x: describe_output(like, x.shape, x.dtype), outputs),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")
            ),
            cost_estimate=pl.CostEstimate(
                flops=passes * tokens * per_token,
                bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves((operands, outputs))),
                transcendentals=passes * tokens * exponentials,
            ),
            interpret=runs_interpreted(),
        )(*operands)
