"""Data-parallel loss and gradient: `value` and `value_and_grad` over a mesh, with gradient accumulation.

A loss function returns a sum and a count. Both are summed over devices and micro-batches and divided once, so that the
mean is exact when shards hold different numbers of tokens.
"""

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from .activation import Activation
from .batch import find_batch_axis
from .collectives import vary, varying
from .gather import attach_gradient_shards, make_gradient_shards
from .mesh import Mesh, require_mesh
from .module import Leaf, is_differentiated, leaves, map_leaves
from .one_forward_one_backward import run_timetable
from .pipeline import Pipelining, active_pipelining
from .rounds import select_round
from .schedule import Schedule, Timetable
from .spmd import OutputDims, ShardMapProgram, SpmdProgram, run_sharded

_logger = logging.getLogger("zoo")

GPIPE = Schedule("gpipe")
"""The schedule unless another is given: right for any loss."""


def value(loss_fn: Callable, mesh: Mesh, *, has_aux: bool = False, microbatches: int | None = None) -> Callable:
    """Return the loss of `value_and_grad` without the gradient, for validation: `value(loss_fn, mesh)(model, batch,
    *rest, key=None)`.

    `microbatches`: None for all rows of a device at once or, on a mesh with `pipe`, for as many as divide its rows, up
    to four for each stage.
    """

    require_mesh(mesh)

    def run(model: PyTree, batch: PyTree, *rest: Any, key: PRNGKeyArray | None = None) -> Any:
        program = _LossAndGrad(loss_fn, mesh, microbatches or 1, has_aux, False, Pipelining(microbatches))
        loss, aux, _ = run_sharded(program, (model, None, batch, *rest), key)
        return (loss, aux) if has_aux else loss

    return run


def value_and_grad(
    loss_fn: Callable,
    mesh: Mesh,
    *,
    has_aux: bool = False,
    observe: bool = False,
    microbatches: int = 1,
    schedule: Schedule = GPIPE,
) -> Callable:
    """Compute a loss over all devices of the mesh, and its gradient with respect to the trainable parameters.

    `loss_fn(model, batch, *rest)` runs on one device's shard of the batch and returns `total, count`: the loss summed
    over the tokens of the shard, and their number. The result is `sum(total) / sum(count)` over devices and
    micro-batches (0 if the count is 0), and its gradient, summed in float32 and sharded as `mesh.optimizer` specifies.

    - `has_aux`: `loss_fn` returns `(total, count), aux`; every array of `aux` is summed likewise but not divided, and
      the result is `(loss, aux), gradients`.
    - `observe`: the result is `loss, gradients, observations`, for a model with `observed()` fields. The
      observations are the values that the backward pass returned for these fields, maxima over devices and
      micro-batches, in a model with None in place of every other array.
    - `microbatches`: gradient accumulation: each device's rows are processed in this many micro-batches, sequentially.
      On a mesh with `pipe` they follow one another through the stages.
    - `schedule`: order of forward and backward passes in the stages of a pipeline, for meshes with `pipe`: GPipe, which
      holds for any loss, or 1F1B, for a loss that calls the model once.
    - `key`: if given, `loss_fn` receives one PRNG key per row as `key=`, so that randomness does not depend on the
      assignment of rows to devices and micro-batches.
    - `loss_scale`: if given, the total is multiplied by it before the backward pass, and the summed gradient divided by
      it, in float32: loss scaling, without which small gradients underflow in float16 (Micikevicius et al.,
      arXiv:1710.03740, section 3.2).

    Layers gather their parameters. A loss that computes with parameters itself, such as a penalty, takes them from
    `zoo.parallel.gather(model)`: in `model` they may be shards, and with `ZERO2` are NaN.

    **Raises** `ValueError` if devices and micro-batches do not divide the rows, if the model lies on another mesh,
    if `loss_fn` closes over an array (pass it in `rest`), if the loss still varies along an axis that does not
    shard tokens, and if the model has observed fields but `observe` is not set, since their statistics would be
    lost; `NotImplementedError` for a loss that 1F1B cannot cut, and for observed fields in a pipeline.
    """

    require_mesh(mesh)

    def run(
        model: PyTree,
        batch: PyTree,
        *rest: Any,
        key: PRNGKeyArray | None = None,
        loss_scale: Float[Array, ""] | float | None = None,
    ) -> Any:
        pipelining = Pipelining(microbatches, schedule.keep)
        scale = None if loss_scale is None else jnp.asarray(loss_scale, jnp.float32)
        program = _LossAndGrad(loss_fn, mesh, microbatches, has_aux, True, pipelining, schedule)
        if not observe and (names := _name_observed_fields(model)):
            more = f" and {len(names) - 1} more" if names[1:] else ""
            raise ValueError(
                f"the model observes {names[0]}{more}: take what it has seen from value_and_grad(..., observe=True), "
                "which returns `loss, gradients, observations`"
            )
        loss, aux, gradients = run_sharded(program, (model, scale, batch, *rest), key)
        if has_aux:
            loss = (loss, aux)
        return (loss, *_split_observations(gradients)) if observe else (loss, gradients)

    return run


@dataclasses.dataclass(frozen=True)
class _LossAndGrad(ShardMapProgram):
    """Program of `value` and `value_and_grad`: all-reduces the loss; all-reduces or reduce-scatters the gradient."""

    has_aux: bool
    with_grad: bool
    pipelining: Pipelining
    schedule: Schedule = GPIPE

    @property
    def _token_axes(self) -> tuple[str, ...]:
        return self.mesh.axes("batch") + self.mesh.axes("seq")

    def __call__(self, args, keys):
        model, loss_scale, *others = args
        if self._stages > 1:
            self._warn_slow_pipeline()
            if self.with_grad and (names := _name_observed_fields(model)):
                raise NotImplementedError(
                    f"{names[0]} is a maximum over calls, and the stages of a pipeline add up what they return: use a "
                    "mesh with pipe=1, or a model without statistics, such as FP8 without delayed scaling"
                )
        with active_pipelining(self.pipelining):
            return self._run(model, loss_scale, others, keys)

    @property
    def _stages(self) -> int:
        return self.mesh.shape["pipe"]

    def _run(self, model: PyTree, loss_scale: Array | None, others: list, keys: Any) -> tuple:
        params, frozen = eqx.partition(model, map_leaves(is_differentiated, model))
        rows, rest = eqx.partition((others, keys), map_leaves(_has_rows, (others, keys)))
        shard_axes = jax.tree.map(varying, params)
        # Cast once, here: if parameters became varying at each use, each use would all-reduce its gradient.
        params = vary(params, self._token_axes)
        model = eqx.combine(params, frozen)
        if self.with_grad:
            differentiated = make_gradient_shards(params, self.mesh)
        else:
            differentiated = params
        timetable = self._make_timetable()

        def loss(differentiated, rows, round_number=None):
            others, keys = eqx.combine(rows, rest)
            if round_number is None:
                layers = model
            else:
                layers = select_round(model, round_number)
            attached = attach_gradient_shards(layers, differentiated, self.mesh)
            result = self.fn(attached, *others, **({} if keys is None else {"key": keys}))
            total, count, aux = self._check_result(result)
            return total if loss_scale is None else total * loss_scale, (count, aux)

        def run_microbatch(rows):
            if not self.with_grad:
                return (*_flatten_result(loss(differentiated, rows)), None)
            result, gradients = jax.value_and_grad(loss, has_aux=True)(differentiated, rows)
            return (*_flatten_result(result), jax.tree.map(lambda g: g.astype(jnp.float32), gradients))

        if timetable is not None:
            rows = map_leaves(self._split_rows, rows)
            result = run_timetable(loss, differentiated, rows, timetable, keep=self.schedule.keep)
        elif self._stages > 1:
            result = run_microbatch(rows)  # the pipeline splits the rows
        else:
            result = self._sum_over_microbatches(run_microbatch, differentiated, rows)
        total, count, aux, gradients = result
        if self._token_axes:
            total, count = lax.psum((total, count), self._token_axes)
            aux = _map_sums(lambda x: lax.psum(x, self._token_axes), aux)
        count = jnp.where(count == 0, 1, count)
        divisor = count if loss_scale is None else count * loss_scale
        if self.with_grad:
            gradients = map_leaves(partial(self._reduce_gradient, divisor), params, gradients, shard_axes)
        return total / divisor, aux, gradients

    def _warn_slow_pipeline(self) -> None:
        """Warn, once per compilation, of micro-batches too few to keep the stages busy, and of ZeRO-3."""
        stages = self._stages
        rounds = self.mesh.layout.rounds
        count = self.microbatches
        if count < stages and self.pipelining.microbatches is not None:
            idle = [(stages - 1) / (m * rounds + stages - 1) for m in (count, 4 * stages)]
            _logger.warning(
                f"pipe={stages} with {count} micro-batch{'es' if count > 1 else ''} leaves the devices idle for "
                f"{idle[0]:.0%} of the time: microbatches={4 * stages} would for {idle[1]:.0%}"
            )
        if self.with_grad and (axes := self.mesh.axes_at_rest):
            _logger.warning(
                f"parameters are sharded over {' and '.join(axes)} (ZeRO-3), so that a stage all-gathers its layers "
                f"for each of {count} micro-batches, forward and backward: layout=zoo.parallel.ZERO2 shards gradients "
                "and optimizer state, and gathers nothing in the pipeline"
            )

    def _make_timetable(self) -> Timetable | None:
        """Return the timetable of the micro-batches; None if they run one after the other, or in one pipeline that JAX
        differentiates."""
        if not self.with_grad or self._stages == 1 or self.schedule.name == "gpipe":
            return None
        sizes = {"stages": self._stages, "microbatches": self.microbatches, "rounds": self.mesh.layout.rounds}
        return self.schedule.table(**sizes)

    def _check_result(self, result: Any) -> tuple:
        """Check the result of a loss function; cast it to float32 that varies over all axes that shard tokens."""
        loss, aux = result if self.has_aux and _is_pair(result) else (result, ())
        if not _is_pair(loss) or (self.has_aux and not _is_pair(result)):
            wanted = "(total, count), aux" if self.has_aux else "total, count"
            raise ValueError(
                f"with has_aux={self.has_aux} a loss returns `{wanted}`: the loss summed over the tokens of its "
                f"batch, and their number. {_function_name(self.fn)} returned {_describe_result(result)}."
            )
        total, count = loss
        for name, x in (("total", total), ("count", count)):
            if not eqx.is_array_like(x) or jnp.ndim(x) != 0:
                given = _describe_result(x)
                raise ValueError(f"the {name} that {_function_name(self.fn)} returns is a scalar, not {given}")
            _check_varying(x, self._token_axes, f"the {name} that {_function_name(self.fn)} returns")
        if any(map(_is_activation, jax.tree.leaves(aux, is_leaf=_is_activation))):
            self._check_captures()
        for x in jax.tree.leaves(_map_sums(lambda x: x, aux, keep=False)):
            _check_varying(x, self._token_axes, f"an array that {_function_name(self.fn)} returns in aux")
        scalars = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (total, lax.stop_gradient(count)))
        aux = _map_sums(lambda x: vary(jnp.asarray(x), self._token_axes), aux)
        return (*vary(scalars, self._token_axes), aux)

    def _check_captures(self) -> None:
        """Check that the values of `zoo.capture` in the aux of a loss can be returned."""
        if not self._is_captured:
            raise ValueError(
                f"{_function_name(self.fn)} returns values of zoo.capture in aux: capture the loss itself, "
                "zoo.value_and_grad(zoo.capture(loss_fn, *names), mesh, has_aux=True)"
            )
        if self.microbatches > 1:
            raise NotImplementedError("values of micro-batches are not put together: capture with microbatches=1")

    @property
    def _is_captured(self) -> bool:
        return getattr(self.fn, "returns_values", False)

    def _sum_over_microbatches(self, run_microbatch: Callable, params: PyTree, rows: PyTree) -> tuple:
        """Gradient accumulation: scan over micro-batches and sum their results. One micro-batch is live at a time."""
        if self.microbatches == 1:
            return run_microbatch(rows)
        rows = map_leaves(self._split_rows, rows)
        aux = ()
        if self.has_aux:
            aux = jax.eval_shape(lambda rows: run_microbatch(rows)[2], jax.tree.map(lambda x: x[0], rows))
            aux = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), aux)
        zero = jnp.zeros((), jnp.float32)
        zeros = vary((zero, zero, aux), self._token_axes)
        initial = (*zeros, jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params) if self.with_grad else None)

        def add(sums, rows):
            combine = lambda leaf, total, x: jnp.maximum(total, x) if leaf.observed else total + x
            *totals, gradients = sums
            *results, new = run_microbatch(rows)
            totals = jax.tree.map(jnp.add, totals, results)
            return (*totals, map_leaves(combine, gradients, new) if self.with_grad else None), None

        return lax.scan(add, initial, rows)[0]

    def _split_rows(self, leaf: Leaf, x: Array) -> Array:
        """Return the rows of `x` in micro-batches, along a new first dim."""
        axis = find_batch_axis(leaf, x) or 0
        return jnp.moveaxis(x.reshape(*x.shape[:axis], self.microbatches, -1, *x.shape[axis + 1 :]), axis, 0)

    def _reduce_gradient(
        self, divisor: Array, leaf: Leaf, parameter: Array, gradient: Array, shard_axes: frozenset[str]
    ) -> Array:
        """Reduce the gradient of one parameter over the axes that shard tokens, where it is a partial sum.

        It is complete over axes that shard the parameter (`shard_axes`, by its type before any cast): an expert has
        seen the tokens of all devices along `expert`. By its type, a dim that is replicated as uneven is not sharded.

        The backward pass of `gather` has reduce-scattered over the axes that shard gradients in it (ZeRO-2, ZeRO-3).
        Axes that shard only optimizer state (ZeRO-1) are reduce-scattered here, all others all-reduced.

        Of an observed field, the gradient is a maximum.
        """
        if leaf.observed:
            axes = tuple(axis for axis in self._token_axes if axis not in shard_axes)
            return (lax.pmax(gradient, axes) if axes else gradient).astype(parameter.dtype)
        dims = leaf.dims or ()
        scattered = self.mesh.gradients.find_gather_dims(dims)
        remaining = set(self._token_axes) - shard_axes - {axis for _, axes in scattered for axis in axes}
        for dim, axes in self.mesh.optimizer.find_gather_dims(dims):
            if remaining.issuperset(axes):
                gradient = lax.psum_scatter(gradient, axes, scatter_dimension=dim, tiled=True)
                remaining -= set(axes)
        if remaining:
            gradient = lax.psum(gradient, tuple(axis for axis in self._token_axes if axis in remaining))
        return (gradient / divisor).astype(parameter.dtype)

    def out_specs(self, shard_map, run_on_shards, arrays):
        (model, *_), _ = arrays
        differentiated = eqx.filter(model, map_leaves(is_differentiated, model))
        aux = PartitionSpec()
        if self.has_aux and self._is_captured:
            program = SpmdProgram(self.fn, self.mesh, 1, OutputDims.from_tree(""))
            aux = program.out_specs(shard_map, lambda arrays: run_on_shards(arrays)[1], arrays)
        return PartitionSpec(), aux, self.mesh.optimizer.specs(differentiated) if self.with_grad else None


def _check_varying(x: Array | float | int, allowed: tuple[str, ...], name: str) -> None:
    if axes := sorted(varying(x) - set(allowed)):
        raise ValueError(
            f"{name} still differs between devices along {' and '.join(map(repr, axes))}, which shards no tokens. "
            "Over a sharded vocabulary use zoo.cross_entropy; all-reduce other partial results with "
            "zoo.parallel.reduce(x, over=dim)."
        )


def _is_activation(x: Any) -> bool:
    return isinstance(x, Activation)


def _map_sums(function: Callable, aux: PyTree, *, keep: bool = True) -> PyTree:
    """Apply a function to what is summed over devices: all but the values that `zoo.capture` returns, which stay as
    they are, or None unless `keep`."""

    def apply(x: Any) -> Any:
        if _is_activation(x):
            return x if keep else None
        return function(x)

    return jax.tree.map(apply, aux, is_leaf=_is_activation)


def _name_observed_fields(model: PyTree) -> list[str]:
    return [leaf.name for leaf in leaves(model) if leaf.observed]


def _split_observations(gradients: PyTree) -> tuple[PyTree, PyTree]:
    """Return the gradients of trainable parameters, and the statistics of observed fields; each has None in place of
    the other."""
    observations, gradients = eqx.partition(gradients, map_leaves(lambda leaf, _: leaf.observed, gradients))
    return gradients, observations


def _has_rows(leaf: Leaf, x: Any) -> bool:
    return eqx.is_array(x) and find_batch_axis(leaf, x) is not None


def _flatten_result(result: tuple) -> tuple:
    total, (count, aux) = result
    return total, count, aux


def _is_pair(x: Any) -> bool:
    return isinstance(x, tuple | list) and len(x) == 2


def _describe_result(x: Any) -> str:
    if eqx.is_array(x):
        return f"one array of shape {x.shape}"
    return f"{type(x).__name__}" + (f" of {len(x)}" if isinstance(x, tuple | list) else "")


def _function_name(fn: Callable) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
