"""Parts of Pallas kernels for chunked recurrences: products, decays within a chunk, and shapes of results.

In kernels everything is two-dimensional. A number per token is a row, [1, size], as it is stored, or a column, [size,
1], to scale the rows of a matrix; `size` is the number of tokens in a chunk.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from ...implementations import Implementation, find_kernel_obstacle
from ...platform import current_platform
from ..select import RecurrenceRequest, find_sharding_obstacle

Row = Float[Array, "1 size"]
Column = Float[Array, "size 1"]
Pairs = Float[Array, "size size"]

REFUSED = ("a Pallas kernel of a recurrence", 'set recurrence="chunked", as zoo.twice_differentiable(model) does')
"""Operation and alternative, as errors of missing derivatives name them."""


class ScalarDecays(NamedTuple):
    """Decays between the tokens of a chunk, one per head; 0 where a segment starts in between."""

    pairs: Pairs
    """From the write of the column's token to the read of the row's, exp(g_{j+1} + ... + g_i); 0 for j > i."""
    from_start: Column
    """From the start of the chunk, exp(g_0 + ... + g_i)."""
    to_end: Column
    """To the end of the chunk, exp(g_{i+1} + ... + g_last)."""
    total: Float[Array, "1 1"]


def make_pallas_implementation(
    function: Callable, find_obstacle: Callable[[RecurrenceRequest], str | None]
) -> Implementation[RecurrenceRequest]:
    """Make the implementation "pallas" of a recurrence, which `"auto"` passes over."""
    drawback = "it has not been measured on a TPU yet, so only its name chooses it"
    return Implementation(
        "pallas",
        function,
        lambda request: find_sharding_obstacle(request) or find_obstacle(request),
        find_drawback=lambda request: drawback,
    )


def runs_interpreted() -> bool:
    """Return True where kernels run in Pallas' interpreter: on the CPU."""
    return current_platform() == "cpu"


def find_platform_obstacle() -> str | None:
    """Return why kernels do not run where the program is compiled for, or None."""
    if obstacle := find_kernel_obstacle("cpu", "tpu"):
        return obstacle
    mesh = jax.sharding.get_abstract_mesh()
    if runs_interpreted() and mesh.manual_axes and mesh.size > 1:
        # It evaluates the body of a kernel with operands that vary over mesh axes and constants that do not.
        return "Pallas' interpreter, which runs it on a CPU, does not run on a mesh of several devices"
    return None


def round_up_to_lanes(dim: int) -> int:
    """Return the size that a last dim takes in a TPU's memory, a multiple of its 128 lanes."""
    return -(-dim // 128) * 128


def describe_output(like: Float[Array, "..."], shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Describe an output of `pallas_call` that varies over the mesh axes of an operand."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).mat)


def multiply(
    x: Float[Array, "_ _"], y: Float[Array, "_ _"], *, transpose_x: bool = False, transpose_y: bool = False
) -> Float[Array, "_ _"]:
    """Multiply two matrices, with float32 accumulation and result. Float32 operands are multiplied in float32, not
    rounded to bfloat16 as XLA does by default on a TPU."""
    x_dim = 0 if transpose_x else 1
    y_dim = 1 if transpose_y else 0
    dims = (((x_dim,), (y_dim,)), ((), ()))
    if x.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST
    else:
        precision = lax.Precision.DEFAULT
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def compare_tokens(size: int, *, strict: bool = False) -> Bool[Array, "size size"]:
    """Return a causal mask: True where column <= row, or column < row if `strict`."""
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), dim) for dim in (0, 1))
    return column < row if strict else column <= row


def to_column(row: Row) -> Column:
    """Transpose a row into a column."""
    return _select_diagonal(row).sum(1, keepdims=True)


def to_row(column: Column) -> Row:
    """Transpose a column into a row."""
    return _select_diagonal(column).sum(0, keepdims=True)


def _select_diagonal(x: Row | Column) -> Pairs:
    """Return the diagonal matrix of a row or column, whose sums are either: cheaper on a TPU than a transpose."""
    size = x.size
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), dim) for dim in (0, 1))
    return jnp.where(row == column, x, 0)


def compute_decays(log_decay: Row, count: Row) -> ScalarDecays:
    """Compute the decays of a chunk from its log decays and the counts of segments that start in it up to each token.

    Each exponent is a sum over only the tokens in between, not a difference of two longer sums: the exponents are
    products of log decays with zeros and ones.
    """
    size = log_decay.size
    until = compare_tokens(size)
    before = compare_tokens(size, strict=True)
    sums = multiply(jnp.where(until, log_decay, 0), before.astype(jnp.float32))
    count_column = to_column(count)
    last = count.max(1, keepdims=True)
    pairs = jnp.where(until & (count_column == count), jnp.exp(sums), 0)
    from_start = jnp.exp(jnp.where(until, log_decay, 0).sum(1, keepdims=True))
    to_end = jnp.exp(jnp.where(until, 0, log_decay).sum(1, keepdims=True))
    return ScalarDecays(
        pairs,
        jnp.where(count_column == 0, from_start, 0),
        jnp.where(count_column == last, to_end, 0),
        jnp.where(last == 0, jnp.exp(log_decay.sum(1, keepdims=True)), 0),
    )


def pull_back_decays(exponents: ScalarDecays) -> Row:
    """Compute the cotangent of the log decays from the cotangents of the exponents in `compute_decays`.

    `exponents` holds decays times their cotangents. A log decay is part of the exponents of all ranges that contain it,
    so no sums are subtracted from one another: dg_t = sum of pairs_ij for j < t <= i + ...
    """
    size = exponents.pairs.shape[0]
    until = compare_tokens(size)
    earlier = multiply(exponents.pairs, jnp.where(until, 0.0, 1.0))
    reads = jnp.where(until, earlier + exponents.from_start, 0)
    writes = jnp.where(until, 0, exponents.to_end)
    return (reads + writes).sum(0, keepdims=True) + exponents.total
