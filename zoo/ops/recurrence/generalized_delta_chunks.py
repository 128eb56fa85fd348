"""Chunks of a generalized delta rule and the scan over them: parts of `chunked_delta`, in its notation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from zoo.shapes import MatrixState, Queries, SegmentIds

from ..custom_vjps import run_in_rule
from ..varying import align_varying, vary, varying
from .affine import DenseAffineMap, IncomingState
from .chunks import (
    batched_matmul,
    count_segment_starts,
    decay_from_start,
    decay_to_end,
    decayed_product,
    exclude_own_token,
    exp_segsum,
    split_into_chunks,
)
from .triangular import solve_unit_triangular


class _ChunkTransition(NamedTuple):
    """The map that chunks apply to the state: U = read S + constant,  S' = chunk_decay S + writeᵀ U + kv_update."""

    chunk_decay: Float[Array, "*chunks dim"]
    """The total decay of a chunk, one per head or per key channel; 0 where a segment starts in it."""
    read: Float[Array, "*chunks rows key_dim"]
    constant: Float[Array, "*chunks rows value_dim"]
    write: Float[Array, "*chunks rows key_dim"]
    kv_update: Float[Array, "*chunks key_dim value_dim"] | None
    """The update by separate keys and values."""


class DeltaOperands(NamedTuple):
    """The operands of a generalized delta rule, which vary over the same mesh axes."""

    query: Queries
    read: Float[Array, "batch rows heads key_dim"]
    write: Float[Array, "batch rows heads key_dim"]
    write_value: Float[Array, "batch rows heads value_dim"] | None
    key: Float[Array, "batch rows heads key_dim"] | None
    value: Float[Array, "batch rows heads value_dim"] | None
    log_decay: Float[Array, "batch seq heads dim"]
    """Float32; dim is 1 for one decay per head."""
    state: MatrixState

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
        """Check shapes and fill in defaults, with decays and state in float32. **Raises** `ValueError`."""
        seq = query.shape[1]
        rows = read.shape[1]
        if rows != seq * steps:
            raise ValueError(
                f"delta: {steps} steps for each of {seq} tokens are {seq * steps} rows, and there are {rows}"
            )
        if (key is None) != (value is None):
            raise ValueError("delta: give keys and values, or neither")
        values = write_value if value is None else value
        if values is None:
            raise ValueError("delta: nothing is ever written without write_value or value; give one of them, or both")
        if log_decay is None:
            log_decay = jnp.zeros(query.shape[:3], jnp.float32)
        if log_decay.ndim == 3:
            log_decay = log_decay[..., None]
        if state is None:
            state = jnp.zeros((read.shape[0], *read.shape[2:], values.shape[3]), jnp.float32)
        log_decay = log_decay.astype(jnp.float32)
        state = state.astype(jnp.float32)
        return cls(*align_varying(query, read, write, write_value, key, value, log_decay, state))

    @property
    def dtype(self) -> Any:
        """The dtype of the values and of the output."""
        if self.value is not None:
            return self.value.dtype
        if self.write_value is not None:
            return self.write_value.dtype
        return self.write.dtype


class DeltaChunks:
    """The rows of all chunks, [batch, chunks, heads, size, dim], and all computations that do not need the state."""

    def __init__(
        self,
        operands: DeltaOperands,
        segment_ids: SegmentIds | None,
        steps: int,
        read_before_decay: bool,
        chunk_size: int,
    ):
        if chunk_size < steps or chunk_size & (chunk_size - 1):
            raise ValueError(
                f"delta: chunk_size is {chunk_size}; it is a power of two and holds the {steps} steps of a token"
            )
        seq = operands.query.shape[1]
        tokens = 1 << (min(chunk_size // steps, 2 * seq - 1).bit_length() - 1)
        dtype = jnp.result_type(*(x for x in operands[:6] if x is not None))
        rows = lambda x: split_into_chunks(x.astype(dtype), tokens * steps)
        self.query = split_into_chunks(operands.query.astype(dtype), tokens)
        self.read = rows(operands.read)
        self.write = rows(operands.write)
        if operands.write_value is None:
            self.write_value = None
        else:
            self.write_value = rows(operands.write_value)
        if operands.key is None or operands.value is None:
            self.key_value = None
        else:
            self.key_value = (rows(operands.key), rows(operands.value))
        self.log_decay = split_into_chunks(operands.log_decay, tokens)
        self.row_decay = _expand_decay_to_rows(self.log_decay, steps)
        if self.row_decay.shape[-1] == 1:
            self.decay_between = exp_segsum(self.row_decay[..., 0])
        else:
            self.decay_between = None
        if segment_ids is None:
            self.count = None
        else:
            self.count = count_segment_starts(segment_ids, seq, tokens)[:, :, None]
        self.steps = steps
        self.read_before_decay = read_before_decay

    def compute_transition(self) -> _ChunkTransition:
        """Compute the transition of every chunk, with the chunk dim first."""
        decay = decay_from_start(self.row_decay, exclusive=self.read_before_decay)
        decay = self._mask_after_segment_start(decay, self.steps)
        constant = 0 if self.write_value is None else self.write_value
        if self.key_value is not None:
            key, value = self.key_value
            constant = constant + _apply_scores(self._decayed_scores(self.read, key, strict=True), value)
        right = jnp.concatenate([self.read * decay, constant], axis=-1).astype(self.read.dtype)
        solution = solve_unit_triangular(self._decayed_scores(self.read, self.write, strict=True), right)
        to_end = decay_to_end(self.row_decay)
        chunk_decay = jnp.exp(self.log_decay.sum(-2))
        if self.count is not None:
            count = jnp.repeat(self.count, self.steps, axis=-1)
            to_end = jnp.where((count == count[..., -1:])[..., None], to_end, 0)
            chunk_decay = jnp.where(count[..., -1:] == 0, chunk_decay, 0)
        decay_rows = lambda rows: (rows * to_end).astype(rows.dtype)
        kv_update = None
        if self.key_value is not None:
            kv_update = batched_matmul(decay_rows(self.key_value[0]).mT, self.key_value[1])
        read, constant = jnp.split(solution, [self.read.shape[-1]], axis=-1)
        transition = _ChunkTransition(chunk_decay, read, constant, decay_rows(self.write), kv_update)
        return jax.tree.map(lambda x: x.swapaxes(0, 1), transition)

    def compute_output(self, boundary_states: Array, updates: Array) -> Array:
        """Compute the outputs of all chunks from the states before them and the updates within."""
        decay = self._mask_after_segment_start(decay_from_start(self.log_decay), 1)
        query = (self.query * decay).astype(self.query.dtype)
        output = batched_matmul(query, boundary_states.swapaxes(0, 1).astype(query.dtype))
        output = output + _apply_scores(self._decayed_scores(self.query, self.write), updates.swapaxes(0, 1))
        if self.key_value is not None:
            key, value = self.key_value
            output = output + _apply_scores(self._decayed_scores(self.query, key), value)
        return output

    def _decayed_scores(self, rows: Array, columns: Array, *, strict: bool = False) -> Array:
        """Compute decayed products of reads (`strict`) or queries with written vectors, masked to the same segment."""
        if self.decay_between is not None:
            if strict:
                decay = exclude_own_token(self.decay_between, exclusive=self.read_before_decay)
            else:
                decay = self.decay_between[..., self.steps - 1 :: self.steps, :]
            scores = batched_matmul(rows, columns.mT) * decay
        else:
            scores = self._decayed_scores_by_step(rows, columns, strict)
        if self.count is not None:
            row_steps = self.steps if strict else 1
            row = jnp.repeat(self.count, row_steps, axis=-1)
            column = jnp.repeat(self.count, self.steps, axis=-1)
            scores = jnp.where(row[..., :, None] == column[..., None, :], scores, 0)
        return scores

    def _decayed_scores_by_step(self, rows: Array, columns: Array, strict: bool) -> Array:
        """Compute decayed products with one decay per key channel, separately for each pair of steps of a token."""
        size = self.log_decay.shape[-2]
        steps = self.steps
        row_steps = steps if strict else 1

        def block(i: int, j: int) -> Array:
            return decayed_product(
                rows[..., i::row_steps, :],
                columns[..., j::steps, :],
                self.log_decay,
                strict=strict and j >= i,
                exclusive=strict and self.read_before_decay and i == 0,
            )

        blocks = jnp.stack([jnp.stack([block(i, j) for j in range(steps)], -1) for i in range(row_steps)], -3)
        return blocks.reshape(*rows.shape[:-2], size * row_steps, size * steps)

    def _mask_after_segment_start(self, decay: Array, repeats: int) -> Array:
        """Zero the decay from the start of the chunk after a segment starts in it."""
        if self.count is None:
            return decay
        return jnp.where((jnp.repeat(self.count, repeats, axis=-1) == 0)[..., None], decay, 0)


def _expand_decay_to_rows(x: Float[Array, "*lead tokens dim"], steps: int) -> Float[Array, "*lead rows dim"]:
    """Expand log decays of tokens to rows: the first row of a token decays, the others do not."""
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
    """Scan over chunks: returns the last state, the states before each chunk, and the updates u of each.

    The custom VJP scans backward over the cotangent of the state only; the cotangents of the transitions, outer
    products over rows, are batched over all chunks, where JAX would compute them inside the scan.
    """

    def step(state: Array, chunk: _ChunkTransition) -> tuple[Array, tuple[Array, Array]]:
        update = chunk.constant + _multiply(chunk.read, state.astype(chunk.read.dtype))
        update = update.astype(chunk.write.dtype)
        after = chunk.chunk_decay[..., None] * state + _multiply(chunk.write.mT, update)
        if chunk.kv_update is not None:
            after = after + chunk.kv_update
        return after, (state, update)

    state, (boundary_states, updates) = lax.scan(step, state, chunks)
    return state, boundary_states, updates


def _scan_chunks_fwd(state: Array, chunks: _ChunkTransition) -> tuple[tuple, tuple]:
    """Return the states, and the transitions, boundary states and updates as residuals."""
    outputs = run_in_rule(scan_chunks, state, chunks)
    return outputs, (chunks, *outputs[1:])


def _scan_chunks_bwd(residuals: tuple, gradients: tuple) -> tuple[Array, _ChunkTransition]:
    """Return the cotangents. With D the cotangent of the state after a chunk, the cotangent of its u is dU' = b h D +
    dU, and the cotangent of the state before it f_C D + Wᵀ dU'."""
    chunks, boundary_states, updates = residuals
    grad_last, grad_boundaries, grad_updates = gradients

    def step(grad_state: Array, chunk: tuple) -> tuple[Array, tuple[Array, Array]]:
        chunk_decay, read, write, grad_boundary, grad_update = chunk
        grad_update = (grad_update + _multiply(write, grad_state.astype(write.dtype))).astype(read.dtype)
        grad_before = chunk_decay[..., None] * grad_state + _multiply(read.mT, grad_update) + grad_boundary
        return grad_before, (grad_state, grad_update)

    xs = (chunks.chunk_decay, chunks.read, chunks.write, grad_boundaries, grad_updates)
    grad_first, (grad_after, grad_updates) = lax.scan(step, grad_last, xs, reverse=True)
    grad_decay = (grad_after * boundary_states).sum(-1)
    if chunks.chunk_decay.shape[-1] == 1:
        grad_decay = grad_decay.sum(-1, keepdims=True)
    outer = lambda rows, state, like: _multiply(rows, state.mT.astype(rows.dtype)).astype(like.dtype)
    grad_read = outer(grad_updates, boundary_states, chunks.read)
    grad_write = outer(updates, grad_after, chunks.write)
    grad_constant = grad_updates.astype(chunks.constant.dtype)
    grad_kv = None if chunks.kv_update is None else grad_after
    return grad_first, _ChunkTransition(grad_decay, grad_read, grad_constant, grad_write, grad_kv)


scan_chunks.defvjp(_scan_chunks_fwd, _scan_chunks_bwd)


def _multiply(x: Float[Array, "*lead rows inner"], y: Float[Array, "*lead inner columns"]) -> Array:
    """Multiply batches of matrices inside a rule."""
    return batched_matmul(x, y, custom_vjp=False)


def scan_chunks_of_shard(
    find_state: IncomingState, zeros: MatrixState, chunks: _ChunkTransition
) -> tuple[
    Float[Array, "batch heads key_dim dim"],
    Float[Array, "chunks batch heads key_dim dim"],
    Float[Array, "chunks batch heads rows dim"],
]:
    """Compute `scan_chunks` from the state that `find_state` returns for the map of all chunks. `zeros` is an empty
    state.

    Scans once, over the identity matrix and the empty state, concatenated: this gives all results as maps of the state
    before the chunks. Products apply these maps, batched over chunks and rounded like the products in the scan.
    """
    width = chunks.read.shape[-1]
    identity = jnp.broadcast_to(jnp.eye(width, dtype=jnp.float32), (*zeros.shape[:2], width, width))
    identity = vary(identity, varying(zeros))

    def pad(x: Array | None) -> Array | None:
        if x is None:
            return None
        return jnp.concatenate([jnp.zeros((*x.shape[:-1], width), x.dtype), x], axis=-1)

    padded = chunks._replace(constant=pad(chunks.constant), kv_update=pad(chunks.kv_update))
    results = scan_chunks(jnp.concatenate([identity, zeros], axis=-1), padded)
    last, boundary_states, updates = (DenseAffineMap(x[..., :width], x[..., width:]) for x in results)
    state = find_state(last)
    dtype = chunks.read.dtype
    rounded = jnp.broadcast_to(state.astype(dtype), (updates.factor.shape[0], *state.shape))
    apply = lambda x: x.offset + batched_matmul(x.factor.astype(dtype), rounded)
    return last.apply(state), apply(boundary_states), apply(updates).astype(updates.offset.dtype)


def _apply_scores(scores: Float[Array, "*lead rows columns"], x: Float[Array, "*lead columns dim"]) -> Array:
    """Multiply float32 scores, rounded to the dtype of `x`, with the rows of `x`."""
    return batched_matmul(scores.astype(x.dtype), x)
