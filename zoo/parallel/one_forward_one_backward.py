"""The schedule 1F1B: the parts of a loss run by a timetable, one forward and one backward pass in each tick.

PipeDream-flush (Narayanan et al., arXiv:2006.09503), and its interleaved form (arXiv:2104.04473). The backward pass of
a micro-batch begins in the tick in which its forward pass ends, so the memory of a stage depends on the number of
stages, not on the number of micro-batches.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Var
from jaxtyping import Array, Int, PyTree

from .collectives import vary, vary_as_returned, varying
from .loss_parts import Loss, LossParts
from .pipeline import broadcast_from, select, send_to_next, send_to_previous
from .rounds import add_round, select_round
from .schedule import Timetable


class _Result(NamedTuple):
    """Sums over micro-batches."""

    total: Array
    count: Array
    aux: PyTree
    gradients: PyTree


class _Carry(NamedTuple):
    """State that a device carries from tick to tick."""

    arrived: PyTree
    """Output of the stage before, in the last tick."""
    returned: PyTree
    """Gradient from the stage after, in the last tick."""
    kept: PyTree
    """Slots for the inputs or residuals of a micro-batch, which the stage keeps until its backward pass."""
    result: _Result


class _Now(NamedTuple):
    """A row of the timetable."""

    forward: Int[Array, "stages 3"]
    backward: Int[Array, "stages 3"]
    enters: Int[Array, ""]
    ends: Int[Array, ""]
    returns: Int[Array, ""]


def run_timetable(
    loss: Loss, parameters: PyTree, microbatches: PyTree, table: Timetable, *, keep: str = "inputs"
) -> tuple[Array, Array, PyTree, PyTree]:
    """Return total, count and aux of a loss, summed over micro-batches, and the gradient of the total with respect to
    the parameters, summed in float32.

    - `microbatches`: rows, with a leading dim of micro-batches.
    - `keep`: state of a micro-batch that a stage keeps between its two passes: "inputs", from which the backward pass
      recomputes the rest, or "residuals".

    **Raises** `ValueError` if the loss does not call the stack; `NotImplementedError` if it calls the stack twice or
    inside a transformation such as `jax.jit` or `jax.checkpoint`, and for residuals in several rounds.
    """
    if keep == "residuals" and table.rounds > 1:
        raise NotImplementedError(
            'keep="residuals" would keep the weights of a round with every micro-batch: take keep="inputs" with '
            f"rounds={table.rounds}, or one round"
        )
    parts = LossParts(loss, microbatches)
    one_round = select_round(parameters, 0)
    # The carry of a stage varies over the same axes as the output of a stage.
    front = vary(parts.run_front(parameters, 0), ("pipe",))
    entered = vary_as_returned(lambda stream: parts.run_stage(one_round, stream, 0, 0), front)
    keeper = (_KeepResiduals if keep == "residuals" else _KeepInputs)(parts, one_round, entered)
    return _Pipeline(parts, keeper, parameters, table).run(entered)


class _KeepInputs:
    """Keeps the input of a stage. Its backward pass runs the stage again."""

    def __init__(self, parts: LossParts, parameters: PyTree, entered: PyTree):
        self.parts = parts

    def run_forward(self, parameters: PyTree, stream: PyTree, microbatch: Any, number: Any) -> tuple[PyTree, PyTree]:
        return self.parts.run_stage(parameters, stream, microbatch, number), stream

    def run_backward(self, parameters: PyTree, kept: PyTree, gradient: PyTree, microbatch: Any, number: Any) -> Any:
        run = lambda parameters, stream: self.parts.run_stage(parameters, stream, microbatch, number)
        return jax.vjp(run, parameters, kept)[1](gradient)


class _KeepResiduals:
    """Keeps the residuals of a stage, as `remat` of the layers chooses them. Residuals that depend only on parameters,
    namely the parameters and the casts of them in the loss, are kept once and not for every micro-batch."""

    def __init__(self, parts: LossParts, parameters: PyTree, entered: PyTree):
        self.parts = parts
        self.structure: Any = None

        def list_residuals(stream, microbatch):
            _, residuals, self.structure = self._run(parameters, stream, microbatch)
            return residuals

        args = entered, _number_first()
        self.is_constant = _find_constant_results(jax.make_jaxpr(list_residuals)(*args).jaxpr)
        residuals = zip(list_residuals(*args), self.is_constant, strict=True)
        self.constants = [x for x, is_constant in residuals if is_constant]

    def run_forward(self, parameters: PyTree, stream: PyTree, microbatch: Any, number: Any) -> tuple[PyTree, PyTree]:
        y, residuals, _ = self._run(parameters, stream, microbatch)
        return y, [x for x, is_constant in zip(residuals, self.is_constant, strict=True) if not is_constant]

    def run_backward(self, parameters: PyTree, kept: PyTree, gradient: PyTree, microbatch: Any, number: Any) -> Any:
        constants = iter(self.constants)
        others = iter(kept)
        residuals = [next(constants if is_constant else others) for is_constant in self.is_constant]
        return jax.tree.unflatten(self.structure, residuals)(gradient)

    def _run(self, parameters: PyTree, stream: PyTree, microbatch: Any) -> tuple[PyTree, list[Array], Any]:
        run = lambda parameters, stream: self.parts.run_stage(parameters, stream, microbatch, 0)
        y, pull_back = jax.vjp(run, parameters, stream)
        return y, *jax.tree.flatten(pull_back)


def _find_constant_results(jaxpr: Any) -> list[bool]:
    """Return for each result of a jaxpr whether it depends on no argument."""
    changing = set(jaxpr.invars)
    for equation in jaxpr.eqns:
        if any(isinstance(x, Var) and x in changing for x in equation.invars):
            changing.update(equation.outvars)
    return [not (isinstance(x, Var) and x in changing) for x in jaxpr.outvars]


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """The executor of a timetable."""

    parts: LossParts
    keeper: _KeepInputs | _KeepResiduals
    parameters: PyTree
    table: Timetable

    def run(self, entered: PyTree) -> _Result:
        """Run all ticks: a scan for each phase of the timetable."""
        table = self.table
        one_round = select_round(self.parameters, 0)
        kept = _make_zeros_of(lambda: self.keeper.run_forward(one_round, entered, _number_first(), 0)[1])
        slots = jax.tree.map(lambda x: jnp.broadcast_to(x, (table.num_slots, *x.shape)), kept)
        tail = _make_zeros_of(lambda: self.parts.run_tail(self.parameters, broadcast_from(entered, 0), 0))
        gradients = jax.tree.map(lambda x: vary(jnp.zeros(x.shape, jnp.float32), varying(x)), self.parameters)
        total, (count, aux) = tail
        carry = _Carry(entered, _make_zeros(entered), slots, _Result(total, count, aux, gradients))
        columns = table.forward, table.backward, table.enters, table.ends, table.returns
        for phase in table.phases:
            now = _Now(*(jnp.asarray(column[phase.begin : phase.end], jnp.int32) for column in columns))
            carry, _ = lax.scan(partial(self._run_tick, phase), carry, now)
        return carry.result

    def _run_tick(self, phase: Any, carry: _Carry, now: _Now) -> tuple[_Carry, None]:
        output = None
        if phase.has_forward:
            carry, output = self._run_forward(carry, now)
        if phase.has_backward:
            carry = self._run_backward(carry, now, output)
        return carry, None

    def _run_forward(self, carry: _Carry, now: _Now) -> tuple[_Carry, PyTree]:
        """Run one micro-batch through the stage, send the output on, and keep what the backward pass needs."""
        stage = lax.axis_index("pipe")
        microbatch, number, slot = now.forward[stage]
        enter = lambda: self.parts.run_front(self.parameters, now.enters)
        entering = self._run_in(now.enters, enter)
        # An idle stage computes, too, on real rows where possible: its results are discarded.
        x = select((stage == 0) & (number <= 0), entering, carry.arrived)
        number = jnp.maximum(number, 0)
        output, kept = self.keeper.run_forward(select_round(self.parameters, number), x, microbatch, number)
        slot = jnp.where(slot < 0, self.table.num_slots, slot)
        slots = jax.tree.map(lambda slots, x: slots.at[slot].set(x, mode="drop"), carry.kept, kept)
        return carry._replace(arrived=send_to_next(output, self.table.stages, self.table.rounds), kept=slots), output

    def _run_backward(self, carry: _Carry, now: _Now, output: PyTree | None) -> _Carry:
        """Run the backward pass of one micro-batch, after the loss of the one that has just left the last stage."""
        table = self.table
        stage = lax.axis_index("pipe")
        result = carry.result
        microbatch, number, slot = now.backward[stage]
        returned = carry.returned
        if output is not None:
            sums, gradient = self._run_in(now.ends, partial(self._differentiate_tail, output, now.ends))
            result = jax.tree.map(lambda x, y: x + y.astype(x.dtype), result, sums)
            returned = select((stage == table.stages - 1) & (number == table.rounds - 1), gradient, returned)
        returned = select(microbatch >= 0, returned, _make_zeros(returned))
        # An idle stage reads slot 0, which is written first: zeros, as residuals, could give 0 / 0.
        kept = jax.tree.map(lambda slots: slots[jnp.maximum(slot, 0)], carry.kept)
        round_number = jnp.maximum(number, 0)
        one_round = select_round(self.parameters, round_number)
        gradients, gradient = self.keeper.run_backward(one_round, kept, returned, microbatch, round_number)
        sums = add_round(result.gradients, gradients, round_number)
        leaving = select((stage == 0) & (now.returns >= 0), gradient, _make_zeros(gradient))
        gradients = self._run_in(now.returns, partial(self._differentiate_front, leaving, now.returns))
        result = result._replace(gradients=jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, gradients))
        return carry._replace(returned=send_to_previous(gradient, table.stages, table.rounds), result=result)

    def _differentiate_tail(self, output: PyTree, microbatch: Int[Array, ""]) -> tuple[_Result, PyTree]:
        """Return the loss of a micro-batch, given the outputs of the stages, its gradients, and the gradient of the
        last stage's output; zeros for none."""
        stream = broadcast_from(output, self.table.stages - 1)
        run = lambda parameters, stream: self.parts.run_tail(parameters, stream, microbatch)
        result, gradients = jax.value_and_grad(run, (0, 1), has_aux=True)(self.parameters, stream)
        total, (count, aux) = result
        results = _Result(total, count, aux, gradients[0]), gradients[1]
        return select(microbatch >= 0, results, _make_zeros(results))

    def _differentiate_front(self, gradient: PyTree, microbatch: Int[Array, ""]) -> PyTree:
        """Return the gradients of parameters, given the gradient of the first stage's input."""
        gradient = broadcast_from(gradient, 0)

        def run(parameters):
            entered = self.parts.run_front(parameters, microbatch)
            return jax.tree.map(lambda x, g: vary(x, varying(g)), entered, gradient)

        return jax.vjp(run, self.parameters)[1](gradient)[0]

    def _run_in(self, now: Int[Array, ""], run: Callable[[], PyTree]) -> PyTree:
        """Return `run()`, or zeros in a tick whose entry of the timetable is -1, by a branch that all devices take.
        With one round nearly every tick has an entry: then `run` gives zeros itself, without a branch."""
        if self.table.rounds == 1:
            return run()
        zeros = _make_zeros_of(run)
        return lax.cond(now >= 0, run, lambda: zeros)


def _number_first() -> Int[Array, ""]:
    """Return the number of the first micro-batch, of the type of one that differs between stages."""
    return vary(jnp.zeros((), jnp.int32), ("pipe",))


def _make_zeros_of(function: Callable[[], PyTree]) -> PyTree:
    """Return zeros with the shapes, dtypes and varying axes of a function's result, without computing it."""
    axes: list[frozenset[str]] = []

    def call():
        result = function()
        axes.extend(map(varying, jax.tree.leaves(result)))
        return result

    shapes, structure = jax.tree.flatten(jax.eval_shape(call))
    return structure.unflatten(vary(jnp.zeros(x.shape, x.dtype), names) for x, names in zip(shapes, axes, strict=True))


def _make_zeros(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.zeros_like, tree)
