"""Pipeline parallelism: layers as stages on the devices along `pipe`, and micro-batches that pass through them.

`run_stages` runs a pipeline forwards as GPipe does (Huang et al., arXiv:1811.06965), and JAX differentiates it, so that
any loss is right. `zoo.parallel.one_forward_one_backward` cuts a loss where it calls `run_stages`.
"""

import contextvars
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, PyTree

from .collectives import current_mesh, scan, vary

_Tree = TypeVar("_Tree")
Stage = Callable[[PyTree, PyTree, Int[Array, ""]], PyTree]
"""A function `(stream, rows, round) -> stream` of the layers on this device. `stream` and `rows` are trees of arrays
whose first dim is rows: the activations that stages hand on, and the batch arrays that every stage reads."""


@dataclasses.dataclass(frozen=True)
class Pipelining:
    """Options of the pipelines of a program."""

    microbatches: int | None = None
    """Number of micro-batches. None for as many as the rows allow, up to four for each stage."""
    keep: str = "inputs"
    """"inputs": a tick saves its input, and recomputes its residuals in the backward pass. "residuals": saves them."""


active_pipelining = jax.make_user_context(Pipelining())
"""Context manager that sets how `run_stages` runs. It is part of JAX's trace cache key."""

cutting: contextvars.ContextVar[Callable[[Stage, Any, Any], Any] | None] = contextvars.ContextVar(
    "cutting", default=None
)
"""Function that `run_stages` calls instead of running stages, while a loss is cut into parts."""


def run_stages(stage: Stage, stream: _Tree, rows: PyTree) -> _Tree:
    """Pass `stream` through all stages of the pipeline in micro-batches; the result is replicated over `pipe`.

    In each tick a device runs `stage` on one micro-batch and sends the result to the next device. With `Layout(rounds=
    V)` a micro-batch passes V times around. The first and the last ticks leave devices idle: (p - 1) / (m V + p - 1) of
    the time for p stages and m micro-batches. Communication: one `ppermute` per tick, and one all-reduce over `pipe` of
    the result.

    **Raises** `ValueError` if the micro-batches do not divide the rows.
    """
    if (cut := cutting.get()) is not None:
        return cut(stage, stream, rows)
    mesh = current_mesh()
    options = active_pipelining.value
    assert mesh is not None
    stages = mesh.shape["pipe"]
    rounds = mesh.layout.rounds
    count = _choose_microbatches(options.microbatches, jax.tree.leaves(stream)[0].shape[0], stages)
    index = lax.axis_index("pipe")
    last = stages - 1
    if options.keep == "residuals":
        step = stage
    else:
        step = jax.checkpoint(stage, prevent_cse=False)
    # Cast before the loop: its gradient is one all-reduce over `pipe` of the input, for all micro-batches.
    entering = vary(split_rows(stream, count), ("pipe",))
    rows = split_rows(rows, count)
    ends = last + forward_step(np.arange(count), rounds - 1, stages, rounds)
    ticks = np.arange(ends[-1] + 1)
    fed = np.clip(find_microbatch(ticks, stages, rounds)[0], 0, count - 1)

    def tick(arrived: Any, xs: Any) -> tuple[Any, Any]:
        number, entering = xs
        microbatch, round_number = find_microbatch(number - index, stages, rounds)
        is_idle = (microbatch < 0) | (microbatch >= count)
        # An idle stage computes, too, but on real rows: their gradient is finite, and multiplied by zero.
        x = select((index == 0) & (round_number == 0) | is_idle, entering, arrived)
        y = step(x, take_rows(rows, microbatch), jnp.where(is_idle, 0, round_number))
        return send_to_next(y, stages, rounds), y

    fed_rows = jax.tree.map(lambda x: x[fed], entering)
    _, outputs = scan(tick, jax.tree.map(lambda x: x[0], entering), (jnp.asarray(ticks), fed_rows))
    outputs = broadcast_from(jax.tree.map(lambda x: x[ends], outputs), last)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)


def forward_step(microbatch: Any, round_number: Any, stages: int, rounds: int) -> Any:
    """Return the tick in which the first stage runs a micro-batch in a round. Stage s runs it s ticks later.

    Micro-batches go around in groups of one for each stage: the last of a group enters just before the first comes back
    (Narayanan et al., arXiv:2104.04473, section 2.2).
    """
    return microbatch // stages * stages * rounds + round_number * stages + microbatch % stages


def find_microbatch(step: Any, stages: int, rounds: int) -> tuple[Any, Any]:
    """Return micro-batch and round of the first stage in tick `step`: the inverse of `forward_step`."""
    group = step // (stages * rounds)
    within = step % (stages * rounds)
    return group * stages + within % stages, within // stages


def split_rows(tree: _Tree, count: int) -> _Tree:
    """Return the rows of each array in `count` micro-batches, along a new first dim."""
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), tree)


def take_rows(microbatches: _Tree, i: int | Int[Array, ""]) -> _Tree:
    """Return micro-batch `i`, or the nearest that exists."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, jnp.clip(i, 0, len(x) - 1), keepdims=False), microbatches)


def select(predicate: Array, first: _Tree, second: _Tree) -> _Tree:
    """Return the arrays of `first` where the scalar `predicate` is True, else the arrays of `second`."""
    return jax.tree.map(partial(jnp.where, predicate), first, second)


def send_to_next(tree: _Tree, stages: int, rounds: int = 1) -> _Tree:
    """Send arrays to the next stage. With rounds, the last stage sends to the first; without, the first gets zeros."""
    pairs = [(i, (i + 1) % stages) for i in range(stages if rounds > 1 else stages - 1)]
    return jax.tree.map(lambda x: lax.ppermute(x, "pipe", pairs), tree)


def send_to_previous(tree: _Tree, stages: int, rounds: int = 1) -> _Tree:
    """Send arrays to the stage before. With rounds, the first stage sends to the last; without, the last gets zeros."""
    pairs = [((i + 1) % stages, i) for i in range(stages if rounds > 1 else stages - 1)]
    return jax.tree.map(lambda x: lax.ppermute(x, "pipe", pairs), tree)


def broadcast_from(tree: _Tree, stage: int) -> _Tree:
    """Return the arrays of one stage, replicated over `pipe`."""
    is_source = lax.axis_index("pipe") == stage
    return jax.tree.map(lambda x: lax.psum(jnp.where(is_source, x, jnp.zeros_like(x)), "pipe"), tree)


def _choose_microbatches(asked: int | None, rows: int, stages: int) -> int:
    if asked is None:
        return max(n for n in range(1, min(rows, 4 * stages) + 1) if rows % n == 0)
    if rows % asked:
        raise ValueError(f"{rows} rows on a device do not divide evenly over {asked} micro-batches")
    return asked
