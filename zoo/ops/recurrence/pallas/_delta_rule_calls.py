"""Calls of the kernels of `pallas_delta_rule`: grid, blocks, residuals and the custom VJP."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from zoo.shapes import MatrixState

from ...custom_vjps import refuse_second_derivative
from ...varying import align_varying
from ._delta_rule_kernels import backward_kernel, forward_kernel
from .common import REFUSED, describe_output, runs_interpreted

_HeadKeys = Float[Array, "batch heads seq key_dim"]
_HeadValues = Float[Array, "batch heads seq value_dim"]
_Gates = Float[Array, "batch heads chunks 3 size"]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def apply_kernels(
    scale: float, query: _HeadKeys, key: _HeadKeys, value: _HeadValues, gates: _Gates, state: MatrixState
) -> tuple[_HeadValues, MatrixState]:
    """Compute the delta rule of heads and whole chunks: returns the outputs and the last states.

    `gates` are the rows that `_delta_rule_kernels` names. All operands vary over the same mesh axes.
    """
    output, last = _run_forward(scale, query, key, value, gates, state, save=False)
    return output, last


def _apply_kernels_fwd(
    scale: float, query: _HeadKeys, key: _HeadKeys, value: _HeadValues, gates: _Gates, state: MatrixState
) -> tuple[tuple, tuple]:
    """Return the outputs, and the operands, the states before the chunks and the inverses as residuals."""
    operands = refuse_second_derivative((query, key, value, gates, state), *REFUSED)
    output, last, states, inverses = _run_forward(scale, *operands, save=True)
    return (output, last), (query, key, value, gates, states, inverses)


def _apply_kernels_bwd(scale: float, residuals: tuple, gradients: tuple) -> tuple:
    """Run the backward kernel, chunks in reverse."""
    query, key, value, gates, *_ = residuals
    gradients = refuse_second_derivative(gradients, *REFUSED)
    operands = align_varying(*residuals, *gradients)
    blocks = _Blocks(query, value, gates, is_reversed=True)
    return blocks.run(
        partial(backward_kernel, scale=scale),
        (blocks.rows, blocks.rows, blocks.rows, blocks.chunk, blocks.chunk, blocks.chunk, blocks.rows, blocks.head),
        operands,
        (blocks.rows, blocks.rows, blocks.rows, blocks.chunk, blocks.head),
        (query, key, value, gates, operands[-1]),
        products=(12, 10, 14),
        inversions=0,
    )


apply_kernels.defvjp(_apply_kernels_fwd, _apply_kernels_bwd)


def _run_forward(
    scale: float,
    query: _HeadKeys,
    key: _HeadKeys,
    value: _HeadValues,
    gates: _Gates,
    state: MatrixState,
    *,
    save: bool,
) -> tuple:
    """Return the outputs and the last state, and to `save` them, the states before the chunks and the inverses."""
    blocks = _Blocks(query, value, gates)
    batch, heads, chunks = blocks.grid
    size = blocks.size
    refinements = 1 if query.dtype == jnp.float32 else 2
    residuals = [
        jax.ShapeDtypeStruct((batch, heads, chunks, *state.shape[2:]), jnp.float32),
        jax.ShapeDtypeStruct((batch, heads, chunks, size, size), query.dtype),
    ]
    return blocks.run(
        partial(forward_kernel, scale=scale),
        (blocks.rows, blocks.rows, blocks.rows, blocks.chunk, blocks.head),
        (query, key, value, gates, state),
        (blocks.rows, blocks.head, *[blocks.chunk] * (2 * save)),
        (value, state, *residuals[: 2 * save]),
        products=(4, 4, 6),
        inversions=2 * (size.bit_length() - refinements),
    )


class _Blocks:
    """The blocks that arrays are read and written in, on a grid of (batch, heads, chunks)."""

    def __init__(self, query: _HeadKeys, value: _HeadValues, gates: _Gates, *, is_reversed: bool = False):
        batch, heads, self.chunks, _, self.size = gates.shape
        self.grid = (batch, heads, self.chunks)
        self.widths = (query.shape[3], value.shape[3])
        self.is_reversed = is_reversed

    def _index(self, step: Any) -> Any:
        """Return the chunk of a step of the grid."""
        if self.is_reversed:
            return self.chunks - 1 - step
        return step

    def rows(self, x: Any) -> pl.BlockSpec:
        """Return the block of a chunk's rows in an array [batch, heads, seq, dim]."""
        return pl.BlockSpec((None, None, self.size, x.shape[3]), lambda b, h, n: (b, h, self._index(n), 0))

    def chunk(self, x: Any) -> pl.BlockSpec:
        """Return the block of a chunk's matrix in an array [batch, heads, chunks, rows, columns]."""
        return pl.BlockSpec((None, None, None, *x.shape[3:]), lambda b, h, n: (b, h, self._index(n), 0, 0))

    def head(self, x: Any) -> pl.BlockSpec:
        """Return the block of a head's state, [batch, heads, rows, columns]. It stays from chunk to chunk."""
        return pl.BlockSpec((None, None, *x.shape[2:]), lambda b, h, n: (b, h, 0, 0))

    def run(
        self,
        kernel: Callable,
        in_specs: tuple[Callable, ...],
        operands: tuple[Array, ...],
        out_specs: tuple[Callable, ...],
        outputs: tuple[Any, ...],
        *,
        products: tuple[int, int, int],
        inversions: int,
    ) -> tuple:
        """Run a kernel over the grid; `outputs` have the shapes and dtypes of its results.

        Its FLOPs per token are `products` of size key_dim, size value_dim and key_dim value_dim, and 2 size^2 for each
        of the products in `inversions`.
        """
        key_dim, value_dim = self.widths
        size = self.size
        terms = (size * key_dim, size * value_dim, key_dim * value_dim)
        per_token = sum(n * term for n, term in zip(products, terms, strict=True)) + 2 * inversions * size**2
        tokens = math.prod(self.grid) * size
        return pl.pallas_call(
            kernel,
            grid=self.grid,
            in_specs=[spec(x) for spec, x in zip(in_specs, operands, strict=True)],
            out_specs=[spec(x) for spec, x in zip(out_specs, outputs, strict=True)],
            out_shape=[describe_output(operands[0], x.shape, x.dtype) for x in outputs],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
            cost_estimate=pl.CostEstimate(
                flops=tokens * per_token,
                bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*operands, *outputs)),
                transcendentals=tokens * (size + 2),
            ),
            interpret=runs_interpreted(),
        )(*operands)
