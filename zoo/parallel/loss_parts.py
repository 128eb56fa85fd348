"""A loss, cut where it calls the stack of a pipeline into a front, stages and a tail.

The loss is the loss of one device. Run with a stack that raises, it gives the input of the stages: this is its *front*.
Run with a stack that returns its argument, it gives the rest: this is its *tail*. All stages run the same front and
tail, and share the vocabulary out between them.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, PyTree

from .pipeline import Stage, cutting, take_rows

Loss = Callable[[PyTree, PyTree, Any], tuple[Array, tuple[Array, PyTree]]]
"""A function `(parameters, rows, round) -> total, (count, aux)`. The parameters have one round of the stages, or all
rounds if `round` is None."""


@dataclasses.dataclass(frozen=True)
class LossParts:
    """The parts into which the stack cuts a loss, each for one micro-batch."""

    loss: Loss
    microbatches: PyTree

    def run_front(self, parameters: PyTree, microbatch: Any) -> PyTree:
        """Return the input of the first stage."""
        return self._enter(parameters, microbatch, None)[1]

    def run_stage(self, parameters: PyTree, stream: PyTree, microbatch: Any, round_number: Any) -> PyTree:
        """Run the layers of this stage, as the loss has made them: cast, or merged with adapters."""
        stage, _, rows = self._enter(parameters, microbatch, round_number)
        return stage(stream, rows, jnp.asarray(round_number))

    def run_tail(self, parameters: PyTree, stream: PyTree, microbatch: Any) -> tuple[Array, tuple[Array, PyTree]]:
        """Return the loss, given the output of the last stage."""
        calls: list[None] = []

        def leave(stage: Stage, entering: Any, rows: Any) -> Any:
            calls.append(None)
            if len(calls) > 1:
                raise NotImplementedError(
                    "the loss calls the model's layers twice, and 1F1B cuts a loss at one call: leave out `schedule`, "
                    "or take zoo.parallel.Schedule('gpipe'), which pipelines every call"
                )
            return stream

        with _cut(leave):
            result = self.loss(parameters, take_rows(self.microbatches, microbatch), None)
        return result

    def _enter(self, parameters: PyTree, microbatch: Any, round_number: Any) -> tuple[Stage, PyTree, PyTree]:
        def enter(stage: Stage, stream: Any, rows: Any) -> Any:
            raise _Entered(stage, stream, rows)

        try:
            with _cut(enter):
                self.loss(parameters, take_rows(self.microbatches, microbatch), round_number)
        except _Entered as entered:
            stage, stream, rows = entered.args
            return stage, stream, rows
        raise ValueError(
            "the loss does not call the model's layers, so that there is nothing to pipeline: leave out `schedule`"
        )


class _Entered(BaseException):
    """Carries the stages, as the loss calls them, their input, and the rows that they read. No `except Exception` in a
    loss catches it."""


@contextlib.contextmanager
def _cut(cut: Callable) -> Iterator[None]:
    """Let the stack call `cut` in place of its stages. **Raises** `NotImplementedError` if this happens inside a
    transformation, from which its arguments cannot be taken out."""
    state = get_opaque_trace_state()

    def check_and_cut(*args: Any) -> Any:
        if get_opaque_trace_state() != state:
            raise NotImplementedError(
                "the loss calls the model inside a transformation (jax.jit, jax.checkpoint, jax.grad, a scan), where "
                "1F1B cannot cut it: call the model directly and let `remat` of the model rematerialize, or take "
                "zoo.parallel.Schedule('gpipe')"
            )
        return cut(*args)

    token = cutting.set(check_and_cut)
    try:
        yield
    finally:
        cutting.reset(token)
