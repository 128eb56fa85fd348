"""A loss over the whole mesh, and its gradient.

A loss returns a sum and a count; they are summed over devices and micro-batches and divided once, so that shares may
hold unlike numbers of tokens.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, PRNGKeyArray, PyTree

from .collectives import vary, varying
from .layout import Mesh
from .module import Leaf, is_trainable, map_leaves, trainable
from .spmd import ShardMapProgram, run_sharded


def value(loss_fn: Callable, mesh: Mesh, *, has_aux: bool = False, microbatches: int = 1) -> Callable:
    """The loss of `value_and_grad` alone: `value(loss_fn, mesh)(model, batch, *rest, key=None)`. For validation."""

    def run(model: PyTree, batch: PyTree, *rest: Any, key: PRNGKeyArray | None = None) -> Any:
        sums = _LossAndGrad(loss_fn, mesh, microbatches, has_aux, with_grad=False)
        loss, aux, _ = run_sharded(sums, (model, batch, *rest), key)
        return (loss, aux) if has_aux else loss

    return run


def value_and_grad(loss_fn: Callable, mesh: Mesh, *, has_aux: bool = False, microbatches: int = 1) -> Callable:
    """A loss over the whole mesh, and its gradient with respect to all that the model learns.

    `loss_fn(model, batch, *rest)` runs on one device's share and returns `total, count`: the loss summed over the
    tokens it holds, and how many they are. What comes back is `sum(total) / sum(count)`, over devices and micro-batches
    (0 where nothing counts), and the gradient of that, laid out as `mesh.updates` says and summed in float32.

    - `has_aux`: `loss_fn` returns `(total, count), aux`; every array of `aux` is summed likewise, not divided, and the
      result is `(loss, aux), gradients`.
    - `microbatches`: the rows of each device are taken in so many parts, one after another: gradient accumulation.
    - `key`, where given, reaches `loss_fn(..., key=keys)` as one key a row, so that what is random does not depend on
      how rows are dealt to devices and micro-batches.

    **Raises** `ValueError` where rows do not divide, where `loss_fn` closes over an array (pass it in `rest`), and
    where the loss still differs along an axis that does not split tokens.
    """

    def run(model: PyTree, batch: PyTree, *rest: Any, key: PRNGKeyArray | None = None) -> Any:
        sums = _LossAndGrad(loss_fn, mesh, microbatches, has_aux, with_grad=True)
        loss, aux, gradients = run_sharded(sums, (model, batch, *rest), key)
        return ((loss, aux) if has_aux else loss), gradients

    return run


@dataclasses.dataclass(frozen=True)
class _LossAndGrad(ShardMapProgram):
    """A loss as a sum and a count, over devices and micro-batches, with its gradient or without."""

    has_aux: bool
    with_grad: bool

    @property
    def token_axes(self) -> tuple[str, ...]:
        return self.mesh.axes("batch") + self.mesh.axes("seq")

    def __call__(self, args, keys):
        model, *others = args
        learnt, fixed = eqx.partition(model, map_leaves(is_trainable, model))
        rows, whole = eqx.partition((others, keys), map_leaves(_is_batch_array, (others, keys)))
        # Cast once, here: where parameters became varying at each use, each use would sum its gradient over devices.
        learnt = vary(learnt, self.token_axes)

        def sums(learnt, rows):
            others, keys = eqx.combine(rows, whole)
            result = self.fn(eqx.combine(learnt, fixed), *others, **({} if keys is None else {"key": keys}))
            total, count, aux = self.check_result(result)
            return total, (count, aux)

        def part(rows):
            if not self.with_grad:
                return (*_flatten_result(sums(learnt, rows)), None)
            result, gradients = jax.value_and_grad(sums, has_aux=True)(learnt, rows)
            return (*_flatten_result(result), jax.tree.map(lambda g: g.astype(jnp.float32), gradients))

        total, count, aux, gradients = self.sum_over_microbatches(part, learnt, rows)
        if self.token_axes:
            total, count, aux = lax.psum((total, count, aux), self.token_axes)
        count = jnp.where(count == 0, 1, count)
        gradients = map_leaves(partial(self.reduce_gradient, count), learnt, gradients) if self.with_grad else None
        return total / count, aux, gradients

    def check_result(self, result: Any) -> tuple:
        """What a loss returned, held against its contract, as float32 that varies over all axes that split tokens."""
        try:
            (total, count), aux = result if self.has_aux else (result, ())
        except (TypeError, ValueError):
            wanted = "(total, count), aux" if self.has_aux else "total, count"
            raise ValueError(
                f"with has_aux={self.has_aux} a loss returns `{wanted}`: the loss summed over the tokens it was given, "
                f"and how many they are. {_function_name(self.fn)} returned {type(result).__name__}."
            ) from None
        for what, x in (("total", total), ("count", count)):
            if jnp.ndim(x) != 0:
                raise ValueError(f"the {what} that {_function_name(self.fn)} returns is a scalar, not {jnp.shape(x)}")
            _refuse_varying(x, self.token_axes, f"the {what} that {_function_name(self.fn)} returns")
        for x in jax.tree.leaves(aux):
            _refuse_varying(x, self.token_axes, f"what {_function_name(self.fn)} returns in aux")
        scalars = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (total, lax.stop_gradient(count)))
        return vary((*scalars, jax.tree.map(jnp.asarray, aux)), self.token_axes)

    def sum_over_microbatches(self, part: Callable, params: PyTree, rows: PyTree) -> tuple:
        """The sums of `part` over micro-batches, one after another: what lives at a time is one of them."""
        if self.microbatches == 1:
            return part(rows)
        rows = jax.tree.map(lambda x: x.reshape(self.microbatches, -1, *x.shape[1:]), rows)
        aux = ()
        if self.has_aux:
            aux = jax.eval_shape(lambda rows: part(rows)[2], jax.tree.map(lambda x: x[0], rows))
            aux = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), aux)
        zeros = vary((jnp.zeros(()), jnp.zeros(()), aux), self.token_axes)
        start = (*zeros, jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params) if self.with_grad else None)
        return lax.scan(lambda sums, rows: (jax.tree.map(jnp.add, sums, part(rows)), None), start, rows)[0]

    def reduce_gradient(self, count: Array, leaf: Leaf, parameter: Array, gradient: Array) -> Array:
        """One gradient, summed over all devices that split tokens. `gather` has summed over the axes that a parameter
        is stored along; those that only its update lies along (ZeRO-1) take their piece of the sum here."""
        dims = leaf.dims or ()
        open_axes = set(self.token_axes) - {axis for _, axes in self.mesh.find_gather_dims(dims) for axis in axes}
        for place, axes in self.mesh.optimizer.find_gather_dims(dims):
            if open_axes.issuperset(axes):
                gradient = lax.psum_scatter(gradient, axes, scatter_dimension=place, tiled=True)
                open_axes -= set(axes)
        if open_axes:
            gradient = lax.psum(gradient, tuple(axis for axis in self.token_axes if axis in open_axes))
        return (gradient / count).astype(parameter.dtype)

    def out_specs(self, shard_map, on_one_device, arrays):
        (model, *_), _ = arrays
        return PartitionSpec(), PartitionSpec(), self.mesh.optimizer.specs(trainable(model)) if self.with_grad else None


def _refuse_varying(x: Array | float | int, allowed: tuple[str, ...], what: str) -> None:
    if axes := sorted(varying(x) - set(allowed)):
        raise ValueError(
            f"{what} still differs between devices along {' and '.join(map(repr, axes))}, which splits no tokens. "
            "Over a vocabulary that is split use zoo.cross_entropy; other partial results are summed by "
            "zoo.parallel.reduce(x, over=dim)."
        )


def _is_batch_array(leaf: Leaf, x: Any) -> bool:
    return leaf.dims is None and eqx.is_array(x) and x.ndim > 0


def _flatten_result(result: tuple) -> tuple:
    total, (count, aux) = result
    return total, count, aux


def _function_name(fn: Callable) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
