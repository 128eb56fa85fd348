"""What a chunk of a delta rule is, and the scan over chunks: parts of `zoo.ops.delta.chunked`, in its letters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..varying import vary, varying
from .chunks import (
    batched_matmul,
    count_segment_starts,
    decay_from_start,
    decay_to_end,
    decayed_product,
    exp_segsum,
    split_into_chunks,
)
from .triangular import solve_unit_triangular


class _ChunkTransition(NamedTuple):
    """What chunks do to the state: U = read S + constant,  S' = through S + writeᵀ U + added."""

    chunk_decay: Float[Array, "*chunks dim"]
    """The decay of the whole chunk, a number or one for each of key_dim; 0 where a segment begins in it."""
    read: Float[Array, "*chunks rows key_dim"]
    constant: Float[Array, "*chunks rows value_dim"]
    write: Float[Array, "*chunks rows key_dim"]
    kv_update: Float[Array, "*chunks key_dim value_dim"] | None
    """What keys and values of their own add."""


class DeltaOperands(NamedTuple):
    """What every form is given, with every array varying over the same mesh axes."""

    query: Float[Array, "batch seq heads key_dim"]
    read: Float[Array, "batch rows heads key_dim"]
    write: Float[Array, "batch rows heads key_dim"]
    write_value: Float[Array, "batch rows heads value_dim"] | None
    key: Float[Array, "batch rows heads key_dim"] | None
    value: Float[Array, "batch rows heads value_dim"] | None
    log_decay: Float[Array, "batch seq heads dim"]
    """Float32; one of dim where it is a number a head."""
    state: Float[Array, "batch heads key_dim value_dim"]

    @classmethod
    def from_arrays(
        cls,
        query: Array,
        read: Array,
        write: Array,
        write_value: Array | None,
        key: Array | None,
        value: Array | None,
        log_decay: Array | None,
        state: Array | None,
        steps: int,
    ) -> "DeltaOperands":
        """Decays and the state written out, in float32. **Raises** `ValueError` for what cannot be."""
        seq, rows = query.shape[1], read.shape[1]
        if rows != seq * steps:
            raise ValueError(
                f"delta: {steps} steps for each of {seq} tokens are {seq * steps} rows, and there are {rows}"
            )
        if (key is None) != (value is None):
            raise ValueError("delta: give keys and values, or neither")
        values = write_value if value is None else value
        if values is None:
            raise ValueError("delta: nothing is ever written without new or value; give one of them, or both")
        if log_decay is None:
            log_decay = jnp.zeros(query.shape[:3])
        if log_decay.ndim == 3:
            log_decay = log_decay[..., None]
        if state is None:
            state = jnp.zeros((len(read), *read.shape[2:], values.shape[3]))
        given = (query, read, write, write_value, key, value, log_decay.astype(jnp.float32), state.astype(jnp.float32))
        return cls(*vary(given, frozenset().union(*(varying(x) for x in given if x is not None))))

    @property
    def dtype(self) -> Any:
        """The dtype of the values, and so of the output."""
        return (
            (self.write if self.write_value is None else self.write_value).dtype
            if self.value is None
            else self.value.dtype
        )


class DeltaChunks:
    """The rows of all chunks, [batch, chunks, heads, size, dim], and what of a chunk needs no state."""

    def __init__(
        self,
        operands: DeltaOperands,
        segment_ids: Int[Array, "batch seq"] | None,
        steps: int,
        read_before_decay: bool,
        chunk_size: int,
    ):
        if chunk_size < steps or chunk_size & (chunk_size - 1):
            raise ValueError(
                f"delta: chunk is {chunk_size}; it is a power of two and holds the {steps} steps of a token"
            )
        seq = operands.query.shape[1]
        tokens = 1 << (min(chunk_size // steps, 2 * seq - 1).bit_length() - 1)
        dtype = jnp.result_type(*(x for x in operands[:6] if x is not None))
        rows = lambda x: split_into_chunks(x.astype(dtype), tokens * steps)
        self.query = split_into_chunks(operands.query.astype(dtype), tokens)
        self.read, self.write = rows(operands.read), rows(operands.write)
        self.write_value = None if operands.write_value is None else rows(operands.write_value)
        self.key_value = (
            None if operands.key is None or operands.value is None else (rows(operands.key), rows(operands.value))
        )
        self.log_decay = split_into_chunks(operands.log_decay, tokens)
        self.row_decay = _expand_decay_to_rows(self.log_decay, steps)
        self.count = None if segment_ids is None else count_segment_starts(segment_ids, seq, tokens)[:, :, None]
        self.steps, self.read_before_decay = steps, read_before_decay

    def compute_transition(self) -> _ChunkTransition:
        """What each chunk does to the state, chunks first."""
        reach = self.mask_after_segment_start(
            decay_from_start(self.row_decay, exclusive=self.read_before_decay), self.steps
        )
        constant = 0 if self.write_value is None else self.write_value
        if self.key_value is not None:
            key, value = self.key_value
            constant = constant + _apply_scores(self.decayed_scores(self.read, key, strict=True), value)
        right = jnp.concatenate([self.read * reach, constant], axis=-1).astype(self.read.dtype)
        solution = solve_unit_triangular(self.decayed_scores(self.read, self.write, strict=True), right)
        left = decay_to_end(self.row_decay)
        through = jnp.exp(self.log_decay.sum(-2))
        if self.count is not None:
            count = jnp.repeat(self.count, self.steps, axis=-1)
            left = jnp.where((count == count[..., -1:])[..., None], left, 0)
            through = jnp.where(count[..., -1:] == 0, through, 0)
        keep = lambda rows: (rows * left).astype(rows.dtype)
        added = None if self.key_value is None else batched_matmul(keep(self.key_value[0]).mT, self.key_value[1])
        width = self.read.shape[-1]
        found = _ChunkTransition(through, solution[..., :width], solution[..., width:], keep(self.write), added)
        return jax.tree.map(lambda x: x.swapaxes(0, 1), found)

    def compute_output(self, borders: Array, updates: Array) -> Array:
        """What the queries of all chunks read, of the states before them and of what was written up to them."""
        reach = self.mask_after_segment_start(decay_from_start(self.log_decay), 1)
        carried = (self.query * reach).astype(self.query.dtype)
        output = batched_matmul(carried, borders.swapaxes(0, 1).astype(carried.dtype))
        output = output + _apply_scores(self.decayed_scores(self.query, self.write), updates.swapaxes(0, 1))
        if self.key_value is not None:
            key, value = self.key_value
            output = output + _apply_scores(self.decayed_scores(self.query, key), value)
        return output

    def decayed_scores(self, rows: Array, columns: Array, *, strict: bool = False) -> Array:
        """The decayed products of reads, `strict`, or of queries with what is written, in a segment."""
        decay = self.log_decay
        if decay.shape[-1] == 1:
            table = exp_segsum(self.row_decay[..., 0], strict=strict, exclusive=strict and self.read_before_decay)
            table = table if strict else table[..., self.steps - 1 :: self.steps, :]
            scores = batched_matmul(rows, columns.mT) * table
        else:
            scores = self.decayed_scores_by_step(rows, columns, strict)
        if self.count is not None:
            row = jnp.repeat(self.count, self.steps if strict else 1, axis=-1)
            column = jnp.repeat(self.count, self.steps, axis=-1)
            scores = jnp.where(row[..., :, None] == column[..., None, :], scores, 0)
        return scores

    def decayed_scores_by_step(self, rows: Array, columns: Array, strict: bool) -> Array:
        """The same products with vectors of decays, for each pair of steps, whose rows follow in tokens."""
        size, steps = self.log_decay.shape[-2], self.steps
        row_steps = steps if strict else 1

        def pair(i: int, j: int) -> Array:
            return decayed_product(
                rows[..., i::row_steps, :],
                columns[..., j::steps, :],
                self.log_decay,
                strict=strict and j >= i,
                exclusive=strict and self.read_before_decay and i == 0,
            )

        blocks = jnp.stack([jnp.stack([pair(i, j) for j in range(steps)], -1) for i in range(row_steps)], -3)
        return blocks.reshape(*rows.shape[:-2], size * row_steps, size * steps)

    def mask_after_segment_start(self, reach: Array, repeats: int) -> Array:
        """Zero for what comes after the start of a segment in the chunk: it sees nothing of before."""
        if self.count is None:
            return reach
        return jnp.where((jnp.repeat(self.count, repeats, axis=-1) == 0)[..., None], reach, 0)


def _expand_decay_to_rows(x: Float[Array, "*lead tokens dim"], steps: int) -> Float[Array, "*lead rows dim"]:
    """Decays of tokens as those of rows: the first of a token has it, the others none."""
    rows = jnp.pad(x[..., None, :], [(0, 0)] * (x.ndim - 1) + [(0, steps - 1), (0, 0)])
    return rows.reshape(*x.shape[:-2], -1, x.shape[-1])


@jax.custom_vjp
def scan_chunks(
    state: Float[Array, "batch heads key_dim dim"], chunks: _ChunkTransition
) -> tuple[
    Float[Array, "batch heads key_dim dim"],
    Float[Array, "chunks batch heads key_dim dim"],
    Float[Array, "chunks batch heads rows dim"],
]:
    """The state after all chunks, those before each, and the u of each.

    The gradient is a scan of its own, which carries the state's cotangent back; those of the chunks' matrices, outer
    products over rows, are then batched over all chunks, where JAX's would be made one after another.
    """

    def step(state: Array, chunk: _ChunkTransition) -> tuple[Array, tuple[Array, Array]]:
        update = chunk.constant + batched_matmul(chunk.read, state.astype(chunk.read.dtype))
        update = update.astype(chunk.write.dtype)
        after = chunk.chunk_decay[..., None] * state + batched_matmul(chunk.write.mT, update)
        return after if chunk.kv_update is None else after + chunk.kv_update, (state, update)

    state, (borders, updates) = lax.scan(step, state, chunks)
    return state, borders, updates


def _scan_chunks_fwd(state: Array, chunks: _ChunkTransition) -> tuple[tuple, tuple]:
    """The states, and what their gradient needs."""
    found = scan_chunks(state, chunks)
    return found, (chunks, *found[1:])


def _scan_chunks_bwd(residuals: tuple, gradients: tuple) -> tuple[Array, _ChunkTransition]:
    """With D the cotangent of the state after a chunk, that of its u is b h D + dU, and that of the state before it
    f_C D + Wᵀ of this."""
    chunks, borders, updates = residuals
    last, at_borders, at_updates = gradients

    def step(state: Array, now: tuple) -> tuple[Array, tuple[Array, Array]]:
        through, read, write, at_border, at_update = now
        update = (at_update + batched_matmul(write, state.astype(write.dtype))).astype(read.dtype)
        before = through[..., None] * state + batched_matmul(read.mT, update) + at_border
        return before, (state, update)

    matrices = (chunks.chunk_decay, chunks.read, chunks.write, at_borders, at_updates)
    first, (after, update) = lax.scan(step, last, matrices, reverse=True)
    through = (after * borders).sum(-1)
    if chunks.chunk_decay.shape[-1] == 1:
        through = through.sum(-1, keepdims=True)
    outer = lambda rows, state, like: batched_matmul(rows, state.mT.astype(rows.dtype)).astype(like.dtype)
    read, write = outer(update, borders, chunks.read), outer(updates, after, chunks.write)
    added = None if chunks.kv_update is None else after
    return first, _ChunkTransition(through, read, update.astype(chunks.constant.dtype), write, added)


scan_chunks.defvjp(_scan_chunks_fwd, _scan_chunks_bwd)


def _apply_scores(scores: Float[Array, "*lead rows columns"], x: Float[Array, "*lead columns dim"]) -> Array:
    """Rows taken together by float32 scores, which are rounded to the dtype of the rows first."""
    return batched_matmul(scores.astype(x.dtype), x)
