"""Profiler traces of a few steps, for Perfetto, XProf and TensorBoard."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

_WARMUP_STEPS = 2
"""Steps to skip before the trace, since the first one compiles."""
_TRACED_STEPS = 5


class Profile:
    """Trace the third to seventh step of this process into `directory`; with several processes, into subfolders.

        with Profile(directory, print) as profile:
            for step in range(steps):
                with profile.step(step):
                    ...
            profile.close()

    A shorter run has a shorter trace. `print_line` receives the path of the trace, or the reason why there is none.
    """

    def __init__(self, directory: Path, print_line: Callable[[str], None]):
        several = jax.process_count() > 1
        if several:
            self.directory = Path(directory) / f"process_{jax.process_index()}"
        else:
            self.directory = Path(directory)
        self._print_line = print_line
        self._num_started = 0
        self._steps: list[int] = []
        self._active = False

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            self._stop()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Context of one step: wrap everything that step `number` does."""
        self._num_started += 1
        if self._num_started == _WARMUP_STEPS + 1:
            _wait_for_devices()  # keep earlier steps out of the trace
            jax.profiler.start_trace(self.directory, create_perfetto_trace=True)
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
        """Stop an unfinished trace after the last step, or report that none was started."""
        if self._active:
            self._stop()
        elif not self._steps:
            self._print_line(
                f"no trace: {self._num_started} steps were run, and the first {_WARMUP_STEPS} are skipped: they compile"
            )

    def _stop(self) -> None:
        self._active = False
        _wait_for_devices()
        jax.profiler.stop_trace()
        trace = max(
            self.directory.glob("plugins/profile/*/perfetto_trace.json.gz"), key=lambda path: path.stat().st_mtime
        )
        self._print_line(
            f"a trace of steps {self._steps[0]} to {self._steps[-1]} is in {self.directory}: open {trace} at "
            f"ui.perfetto.dev, or the folder with `xprof {self.directory}` or `tensorboard --logdir {self.directory}`"
        )


def _wait_for_devices() -> None:
    """Block until all devices are idle. Each device executes in order, so a new computation finishes last."""
    jax.block_until_ready([jax.device_put(np.zeros(()), device) + 1 for device in jax.local_devices()])
