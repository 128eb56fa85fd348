"""A scan over layers that gathers the parameters of the next block while one runs, and scatters gradients one behind.

In a plain scan a block starts with its own all-gather, which it waits for, and nothing else is there to run beside it:
XLA moves no collective from one iteration into another. Here the gathered parameters of a block are carried into the
iteration that uses them, so that a gather has the products of a whole block to hide behind. The backward pass
recomputes each block from its saved input, gathers the block before it meanwhile, and reduce-scatters the gradient of
the block after it. At most two gathered blocks and one gradient of a block are in memory.

The loop is one custom VJP: differentiated by JAX, the carried parameters would be saved in every iteration.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Int, PyTree

from zoo.ops.custom_vjps import refuse_forward_mode

from .collectives import current_mesh, scan, vary, vary_as_returned, varying


class _Loop(NamedTuple):
    """The blocks of a pattern, as functions."""

    gathers: tuple[Callable[[PyTree], PyTree], ...]
    """From the arrays of a block at rest to its gathered arrays."""
    runs: tuple[Callable[..., tuple[PyTree, PyTree]], ...]
    """`(gathered arrays, repeat, carry, *constants) -> (carry, output)`."""
    repeats: int

    def find_next(self, block: int, repeat: Int[Array, ""]) -> tuple[int, Int[Array, ""]]:
        """Return number and repeat of the block that runs next; of the last one, itself."""
        if block + 1 < len(self.runs):
            return block + 1, repeat
        return 0, jnp.minimum(repeat + 1, self.repeats - 1)

    def find_previous(self, block: int, repeat: Int[Array, ""]) -> tuple[int, Int[Array, ""]]:
        """Return number and repeat of the block that ran before; of the first one, itself."""
        if block > 0:
            return block - 1, repeat
        return len(self.runs) - 1, jnp.maximum(repeat - 1, 0)


def scan_ahead(
    gathers: Sequence[Callable[[PyTree], PyTree]],
    runs: Sequence[Callable[[PyTree, Int[Array, ""], PyTree], tuple[PyTree, PyTree]]],
    stacked: Sequence[PyTree],
    carry: PyTree,
    repeats: int,
) -> tuple[PyTree, tuple[PyTree, ...]]:
    """Run the blocks of a pattern in turn, `repeats` times: `carry, output = run(gather(arrays), repeat, carry)`.

    - `gathers`, `runs`: two functions per block. `run` may close over arrays that are differentiated, `gather` not.
    - `stacked`: arrays of each block at rest, with a leading dim `repeats`.

    Returns the last carry, and the outputs of each block, stacked. The backward pass recomputes each block.

    **Raises** `TypeError` for a carry with arrays that are not floating point.
    """
    if any(not jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(carry)):
        raise TypeError("a scan that gathers ahead carries floating point only")
    gathered = [gather(_index(arrays, 0)) for gather, arrays in zip(gathers, stacked, strict=True)]
    start = jnp.zeros((), jnp.int32)

    def run_pattern(carry: PyTree) -> PyTree:
        for run, arrays in zip(runs, gathered, strict=True):
            carry, _ = run(arrays, start, carry)
        return carry

    carry = vary_as_returned(run_pattern, carry)
    converted = [jax.closure_convert(run, x, start, carry) for run, x in zip(runs, gathered, strict=True)]
    loop = _Loop(tuple(gathers), tuple(run for run, _ in converted), repeats)
    operands = tuple(stacked), carry, tuple(tuple(constants) for _, constants in converted)
    return _run_loop(loop, *refuse_forward_mode(operands, "a scan that gathers ahead", 'take loop="scan"'))


def _run_blocks(
    loop: _Loop, stacked: tuple[PyTree, ...], carry: PyTree, constants: tuple[tuple[Array, ...], ...], *, save: bool
) -> tuple[PyTree, tuple[PyTree, ...], tuple[PyTree, ...]]:
    """Return the last carry, the outputs of each block, and if asked for the input of each block."""

    def step(state: tuple[PyTree, PyTree], repeat: Int[Array, ""]):
        carry, arrays = state
        outputs = []
        inputs = []
        for block, run in enumerate(loop.runs):
            following, at = loop.find_next(block, repeat)
            next_arrays = loop.gathers[following](_index(stacked[following], at))
            inputs.append(carry if save else None)
            carry, output = run(arrays, repeat, carry, *constants[block])
            outputs.append(output)
            arrays = next_arrays
        return (carry, arrays), (tuple(outputs), tuple(inputs))

    first = loop.gathers[0](_index(stacked[0], 0))
    (carry, _), (outputs, inputs) = scan(step, (carry, first), jnp.arange(loop.repeats))
    return carry, outputs, inputs


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_loop(
    loop: _Loop, stacked: tuple[PyTree, ...], carry: PyTree, constants: tuple[tuple[Array, ...], ...]
) -> tuple[PyTree, tuple[PyTree, ...]]:
    carry, outputs, _ = _run_blocks(loop, stacked, carry, constants, save=False)
    return carry, outputs


def _run_loop_fwd(loop: _Loop, *perturbed_args: Any):
    stacked, carry, constants = jax.tree.map(lambda x: x.value, perturbed_args)
    is_trained = jax.tree.map(lambda x: x.perturbed, perturbed_args[0])
    # Trained and frozen arrays, each with None in place of the other: a tree of residuals holds arrays only.
    trained, frozen = eqx.partition(stacked, is_trained)
    last, outputs, inputs = _run_blocks(loop, stacked, carry, constants, save=True)
    return (last, outputs), (trained, frozen, inputs, constants)


def _run_loop_bwd(loop: _Loop, residuals: Any, cotangents: Any):
    trained, frozen, inputs, constants = residuals
    d_carry, d_outputs = jax.tree.map(_instantiate, cotangents, is_leaf=_is_symbolic_zero)

    def gather(block: int, trained: PyTree, at: Int[Array, ""]) -> tuple[PyTree, PyTree]:
        """Return the gathered arrays of a block, floating point and others."""
        arrays = loop.gathers[block](eqx.combine(trained, _index(frozen[block], at)))
        return eqx.partition(arrays, eqx.is_inexact_array)

    def scatter(block: int, gradient: PyTree, at: Int[Array, ""], total: PyTree) -> PyTree:
        """Reduce-scatter the gradient of gathered arrays, and write it into the stacked gradients."""
        shards = _index(trained[block], at)
        _, transpose = jax.vjp(lambda shards: gather(block, shards, at)[0], shards)
        (part,) = transpose(gradient)
        return jax.tree.map(partial(lax.dynamic_update_index_in_dim, index=at, axis=0), total, part)

    def step(state: Any, xs: Any):
        d_carry, arrays, gradient, totals, d_constants = state
        repeat, block_inputs, block_cotangents = xs
        totals = list(totals)
        d_constants = list(d_constants)
        for block in reversed(range(len(loop.runs))):
            before, at = loop.find_previous(block, repeat)
            previous = gather(before, _index(trained[before], at), at)
            after, at = loop.find_next(block, repeat)
            totals[after] = scatter(after, gradient, at, totals[after])
            run = partial(_run_float, loop.runs[block], arrays[1], repeat)
            _, pull_back = jax.vjp(run, arrays[0], block_inputs[block], constants[block])
            gradient, d_carry, d_used = pull_back((d_carry, block_cotangents[block]))
            d_constants[block] = jax.tree.map(jnp.add, d_constants[block], d_used)
            arrays = previous
        return (d_carry, arrays, gradient, tuple(totals), tuple(d_constants)), None

    last = len(loop.runs) - 1
    end = jnp.int32(loop.repeats - 1)
    arrays = gather(last, _index(trained[last], end), end)
    first, _ = gather(0, _index(trained[0], end), end)
    # No block comes after the last one: its gradient is zero, and what is written for it is written again.
    zeros = jax.tree.map(_make_zeros, (first, trained, constants))
    xs = jnp.arange(loop.repeats), inputs, d_outputs
    state = (d_carry, arrays, *zeros)
    state, _ = scan(step, state, jax.tree.map(lambda x: jnp.flip(x, 0), xs))
    d_carry, _, gradient, totals, d_constants = state
    d_first = scatter(0, gradient, jnp.int32(0), totals[0])
    return (d_first, *totals[1:]), d_carry, d_constants


_run_loop.defvjp(_run_loop_fwd, _run_loop_bwd, symbolic_zeros=True)


def _run_float(
    run: Callable, others: PyTree, repeat: Int[Array, ""], arrays: PyTree, carry: PyTree, constants: tuple[Array, ...]
) -> tuple[PyTree, PyTree]:
    """Run a block, and return the outputs that have gradients."""
    carry, output = run(eqx.combine(arrays, others), repeat, carry, *constants)
    return carry, eqx.filter(output, eqx.is_inexact_array)


def _index(tree: PyTree, i: int | Int[Array, ""]) -> PyTree:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _make_zeros(x: Array) -> Array:
    return vary(jnp.zeros(x.shape, x.dtype), varying(x))


def _instantiate(cotangent: Any) -> Array | None:
    """Return a cotangent as an array, also if it is zero; None for the cotangent of integers."""
    if not jnp.issubdtype(cotangent.dtype, jnp.inexact):
        return None
    if not _is_symbolic_zero(cotangent):
        return cotangent
    zeros = jnp.zeros(cotangent.shape, cotangent.dtype)
    if current_mesh() is None:
        return zeros
    return vary(zeros, frozenset(cotangent.mat.varying))


def _is_symbolic_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)
