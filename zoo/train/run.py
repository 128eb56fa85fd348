"""A run's folder, and what happens around the loop: resuming, logging, saving, leaving when asked to.

    with Run(out, config=config, resume=resume) as run:
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, steps, tokens=batch_size * seq):
            model, opt_state, loss = step(zoo.place_batch(batch, mesh), model, opt_state)
            run.log(loss=loss)
            if run.due(100):
                run.save((model, opt_state), batches, metric=...)

The loop is the caller's. Every object here can be used alone: `Metrics`, `Checkpoints`, `Interrupt`, `Pace`.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from jaxtyping import PyTree

from zoo._files import write_json
from zoo.text.batches import BatchIterator

from .checkpoint import Checkpoints, diff_configs
from .environment import collect_environment
from .interrupt import Interrupt, is_set_on_any_process
from .metrics import Metrics, Record, Value, append_records, truncate_after
from .profile import Profile
from .progress import LineProgress, Progress, SilentProgress, Throughput, make_progress
from .trackers import Tracker

_log = logging.getLogger("zoo")


class Run:
    """One run in one folder: `config.json`, `env.json`, `metrics.jsonl`, `timing.jsonl`, `checkpoints/`.

    `step` counts the steps that are done, the one in the loop's body included. `every` steps metrics are fetched, and
    with several processes signals are shared. With `profile` a trace of a few steps goes to `profile/`
    (`zoo.train.Profile`). `frozen` is what the run reads, and neither learns nor saves: a model around which adapters
    stand, a teacher. What adapters learn in it is left out; of the rest each checkpoint keeps a fingerprint.
    **Raises** `FileExistsError` where the folder holds checkpoints and `resume` is not set.
    """

    def __init__(
        self,
        directory: Path,
        *,
        config: Mapping[str, Any],
        resume: bool = False,
        profile: bool = False,
        fetch_every: int = 10,
        keep_last: int = 2,
        keep_best: int = 1,
        trackers: Sequence[Tracker] = (),
        frozen: PyTree = None,
    ):
        self.directory = Path(directory)
        # Whether a run was resumed or traced is no property of it: the configurations of both halves are the same.
        self.config = {name: value for name, value in config.items() if name not in ("resume", "profile")}
        self.step = 0
        self.total = 0
        self.stopped = False
        self.metrics = Metrics(self.directory / "metrics.jsonl", fetch_every=fetch_every, trackers=trackers)
        self.checkpoints = Checkpoints(
            self.directory / "checkpoints", keep_last=keep_last, keep_best=keep_best, frozen=frozen
        )
        self._every = fetch_every
        self._profile = Profile(self.directory / "profile", self.print_line) if profile else None
        self._interrupt = Interrupt()
        self._pace = Throughput(0)
        self._progress: Progress = LineProgress(0) if jax.process_index() == 0 else SilentProgress()
        self._exit = contextlib.ExitStack()
        self._newest = self.checkpoints.latest_step()
        if self._newest is not None and not resume:
            self.checkpoints.close()
            raise FileExistsError(
                f"{self.directory} holds a run of {self._newest} steps: resume it (--resume), or choose another folder "
                "(--out), or delete this one"
            )

    def __enter__(self) -> "Run":
        self._exit.callback(self.checkpoints.close)
        self._exit.callback(lambda: self._progress.close())
        self._exit.callback(self._close_metrics)
        self._exit.enter_context(self._profile or contextlib.nullcontext())
        self._exit.enter_context(self._interrupt)
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_json(self.directory / "env.json", collect_environment())
            if self._newest is None:
                self._truncate_metrics(0)
                write_json(self.directory / "config.json", self.config)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._exit.__exit__(kind, error, at)

    def restore(self, like: PyTree, batches: BatchIterator | None = None) -> PyTree:
        """The state of the newest checkpoint, and `batches` put where they were; `like` itself where there is none.

        `like` is the state that the run would start with, already placed. Metrics of later steps are cut off: the run
        will write them again. **Raises** `ValueError` where the checkpoint is of another model, or was learnt on top of
        another one than `frozen`; what is in the folder stays as it is.
        """
        if self._newest is None:
            return like
        for line in diff_configs(self.checkpoints.read_config(self._newest), self.config):
            _log.warning("%s: the configuration differs: %s", self.directory, line)
        self.step, state, data, _ = self.checkpoints.restore(like, self._newest)
        if batches is not None:
            if data is None:
                raise ValueError(
                    f"{self.directory}: step {self.step} was saved without batches: where they stood is lost"
                )
            batches.restore(data)
        if jax.process_index() == 0:
            self._truncate_metrics(self.step)
            write_json(self.directory / "config.json", self.config)
        return state

    def steps(self, batches: BatchIterator, total: int, *, tokens: int = 0, flops: float | int = 0) -> Iterator[Any]:
        """Batches for the steps from `step` to `total`; fewer where a signal asks the run to stop.

        `tokens` and `flops` are those of one step in all processes together, for the speed shown.
        """
        if self._newest is not None and self.step == 0:
            raise RuntimeError("this run is resumed: call run.restore before run.steps")
        self.total = total
        self._pace = Throughput(total, tokens=tokens, flops=flops)
        if jax.process_index() == 0:
            self._progress = make_progress(total, start=self.step)
        while self.step < total and not self.stopped:
            with contextlib.nullcontext() if self._profile is None else self._profile.step(self.step + 1):
                batch = next(batches)
                self.step += 1
                # Read once a step, before its body: whoever asks within the step gets the same answer.
                if jax.process_count() == 1 or self.step % self._every == 0:
                    self.stopped = is_set_on_any_process(self._interrupt.requested)
                yield batch
        if self._profile is not None:
            self._profile.close()
        if self.stopped:
            self.print_line(
                f"stopped by a signal after step {self.step} of {total}: --resume goes on from the last checkpoint"
            )

    def log(self, **values: Value) -> None:
        """Log `values`, scalars on the device or numbers, under the current step. Does not wait for the device."""
        self._show_metrics(self.metrics.log(self.step, **values))

    def every(self, steps: int) -> bool:
        """Whether the current step is a multiple of `steps`, or the last: a matter of the step alone."""
        return self.step % steps == 0 or self.step == self.total

    def due(self, steps: int) -> bool:
        """Whether to save now: `every(steps)`, or the run is about to stop."""
        return self.every(steps) or self.stopped

    def save(self, state: PyTree, batches: BatchIterator | None = None, *, metric: float | int | None = None) -> None:
        """Save `state` after the current step, and where `batches` stand; the loop goes on while it is written."""
        self._show_metrics(self.metrics.flush())
        data = None if batches is None else batches.state
        self.checkpoints.save(self.step, state, data=data, config=self.config, metric=metric)

    def print_line(self, text: str) -> None:
        """Show a line of text that stays."""
        self._progress.print_line(text)

    def _show_metrics(self, lines: Sequence[Record]) -> None:
        if lines:
            newest = lines[-1]
            pace = self._pace.tick(newest["step"])
            values = {name: value for line in lines for name, value in line.items() if name != "step"}
            self._progress.update(newest["step"], values, pace)
            if jax.process_index() == 0:
                append_records(self.directory / "timing.jsonl", [dict(step=newest["step"]) | pace])

    def _close_metrics(self) -> None:
        self._show_metrics(self.metrics.flush())
        self.metrics.close()

    def _truncate_metrics(self, step: int) -> None:
        for name in ("metrics.jsonl", "timing.jsonl"):
            truncate_after(self.directory / name, step)
