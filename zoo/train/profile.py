"""A trace of a few steps, for Perfetto, XProf and TensorBoard."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from .trace import write_perfetto_trace

_WARMUP_STEPS = 2
"""Steps before the trace: the first compiles."""
_TRACED_STEPS = 5


class Profile:
    """Traces steps 3 to 7 of those that this process runs, into `directory`; with several processes each into a folder
    of its own there.

        with Profile(directory, print) as profile:
            for step in range(steps):
                with profile.step(step):
                    ...
            profile.close()

    A run with fewer steps has a shorter trace. `say` is told where the trace lies, or why there is none.
    """

    def __init__(self, directory: Path, print_line: Callable[[str], None]):
        several = jax.process_count() > 1
        self.directory = Path(directory) / f"process_{jax.process_index()}" if several else Path(directory)
        self._say = print_line
        self._begun = 0
        self._steps: list[int] = []
        self._active = False

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            self._stop()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around all that belongs to step `number`."""
        self._begun += 1
        if self._begun == _WARMUP_STEPS + 1:
            _wait_for_devices()  # what earlier steps still compute is not in the trace
            jax.profiler.start_trace(self.directory)
            self._active = True
        if not self._active:
            yield
            return
        self._steps.append(number)
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield
        if len(self._steps) == _TRACED_STEPS:
            self._stop()

    def close(self) -> None:
        """After the last step: end a trace that has not ended yet, and say so where none was begun."""
        if self._active:
            self._stop()
        elif not self._steps:
            self._say(
                f"no trace: {self._begun} steps were run, and a trace begins after {_WARMUP_STEPS}, which may compile"
            )

    def _stop(self) -> None:
        self._active = False
        _wait_for_devices()
        jax.profiler.stop_trace()
        trace = write_perfetto_trace(self.directory)
        self._say(
            f"a trace of steps {self._steps[0]} to {self._steps[-1]} lies in {self.directory}: open {trace} at "
            f"ui.perfetto.dev, or the folder with `xprof {self.directory}` or `tensorboard --logdir {self.directory}`"
        )


def _wait_for_devices() -> None:
    """Wait until the devices have done all that was asked of them: a device takes its work in order."""
    jax.block_until_ready([jax.device_put(np.zeros(()), device) + 1 for device in jax.local_devices()])
