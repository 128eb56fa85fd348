"""A run in a directory, around the caller's loop: resume, log, save checkpoints, stop on a signal, report.

    with Run(config, mesh=mesh, data=corpus, model=model) as run:
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, config.steps):
            model, opt_state, loss = step(batch, model, opt_state)
            run.log(loss=loss)
            if run.every(100):
                run.log(**evaluate(model))
            if run.due(100):
                run.save((model, opt_state), batches)
    tools.report_run(run, "A Transformer from scratch", model)

The loop is the caller's. Every object here can be used by itself: `Metrics`, `Checkpoints`, `Interrupt`, `Throughput`.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Key, PyTree

from zoo._files import to_jsonable, write_json
from zoo.adapters import adapter_names
from zoo.parallel import Mesh
from zoo.parallel.batch import place_batch
from zoo.parallel.module import count
from zoo.text.batches import BatchIterator, ShuffledBatches
from zoo.text.run_data import RunData

from .checkpoint import Best, Checkpoints, UnwrittenCheckpointError, diff_configs
from .directory import DirectoryLock, claim_directory
from .environment import collect_environment
from .export import describe_training, export_adapters, export_result
from .finite import describe_retry, find_nan_arrays, find_nonfinite_metrics
from .flops import count_step_flops, find_peak_flops, to_shapes
from .interrupt import Interrupt, is_set_on_any_process
from .metrics import Metrics, MetricsFile, Record, Value, truncate_after
from .options import RunOptions, find_run_options, flatten_config
from .processes import run_on_first
from .profile import Profile
from .progress import LineProgress, Progress, SilentProgress, Throughput, make_progress
from .results import write_results
from .resume import read_learning_rate
from .samples import HeldOutPrompt, continue_prompts
from .trackers import Tracker
from .tracking import Trackers, import_trackers
from .watchdog import Watchdog

_log = logging.getLogger("zoo")


class Run:
    """One run in one directory: `config.json`, `env.json`, `metrics.jsonl`, `timing.jsonl`, `checkpoints/`.

    `step` counts the steps that are done, including the one in the loop's body. Metrics are fetched, and signals shared
    between processes, every `fetch_every` steps. The newest `keep_last` checkpoints are kept, and the `keep_best` with
    the lowest `best_metric` among the steps that logged it; `best="highest"` is for a reward or an accuracy. `frozen`
    is a tree that the run reads but neither trains nor saves, such as a base model under adapters or a teacher: each
    checkpoint keeps a fingerprint of it, without the adapters' own parameters.

    - `options`: a recipe's configuration, which has `RunOptions` among its fields; or only these, or a directory.
    - `config`: what `config.json` holds, by default the recipe's configuration: a dataclass or a mapping. Option groups
      are flattened.
    - `mesh`: `steps` places batches on it. `data`: what samples, results and exports are of, a `Corpus` or `Records`.
    - `model`: the model before training. With it the run begins with a line on its size, mesh and data, and shows FLOPs
      per second. The run keeps no array of it.
    - `name`: of one of several runs, in the subdirectory `name` of the directory; `config.json` has it as "run", and
      trackers have the directory as its group.
    - `trackers`: made by the caller, besides those that `options` name. Only the first process tracks.

    A run stops with `FloatingPointError` at the first metrics that are not finite, and saves no state that holds NaN.
    Metrics of a step that the optimizer skipped may hold any numbers (`zoo.train.count_skips`): the run stops only once
    more than `max_skipped` steps in a row were skipped. If the disk has no room for a checkpoint, the run warns and
    goes on; for the last checkpoint it raises.

    **Raises** `OSError`, before anything is written, if the directory cannot hold a run (`FileExistsError` if it holds
    something else, or checkpoints and `resume` is not set), if another run is in it (`BlockingIOError`), or if all
    checkpoints to resume from are damaged (`FileNotFoundError`); `ImportError` if the package of a tracker is missing.
    """

    def __init__(
        self,
        options: Any,
        *,
        config: Any = None,
        mesh: Mesh | None = None,
        data: RunData | None = None,
        model: PyTree = None,
        name: str | None = None,
        best_metric: str = "validation",
        best: Best = "lowest",
        fetch_every: int = 10,
        keep_last: int = 2,
        keep_best: int = 1,
        max_skipped: int = 20,
        trackers: Sequence[Tracker] = (),
        frozen: PyTree = None,
    ):
        if config is None and not isinstance(options, RunOptions | str | Path):
            config = options
        options = find_run_options(options)
        self.recipe = config
        self.mesh: Any = mesh
        self.data: Any = data
        self._model = to_shapes(model)
        self.config = flatten_config({} if config is None else config)
        group = None
        self.name = name
        if name is not None:
            group = options.out.absolute().name
            options = options.subrun(name)
            self.config["run"] = name
        self.directory = options.out
        self.best: Best = best
        if options.checkpoint_url is not None:
            self.config["checkpoint_url"] = options.checkpoint_url
        self.step = 0
        self.total = 0
        self.stopped = False
        run_on_first(lambda: import_trackers(options.track))
        self._trackers = Trackers(
            self.directory,
            options.track,
            config=self.config,
            group=group,
            resume=options.resume is not False,
            others=trackers,
        )
        self.metrics = Metrics(self.directory / "metrics.jsonl", fetch_every=fetch_every, trackers=[self._trackers])
        self._timing = MetricsFile(self.directory / "timing.jsonl")
        self._best_metric = best_metric
        self._best_value: tuple[int, Any] | None = None
        self._rate_before: float | None = None
        self._every = fetch_every
        self._max_skipped = max_skipped
        if options.profile:
            self._profile = Profile(self.directory / "profile", self.print_line)
        else:
            self._profile = None
        self._watchdog: Watchdog | None = None
        if options.watchdog:
            self._watchdog = Watchdog(self.directory / f"stacks-{jax.process_index()}.log", options.watchdog)
        self._interrupt = Interrupt()
        self._pace = Throughput(0)
        self._progress: Progress = SilentProgress()
        if jax.process_index() == 0:
            self._progress = LineProgress(0)
        self._is_resumed = options.resume is not False
        self._named = None if isinstance(options.resume, bool) else options.resume
        self._checkpoint_folder = options.checkpoints
        with contextlib.ExitStack() as exits:
            lock = DirectoryLock(self.directory)
            exits.callback(lock.release)
            run_on_first(lambda: claim_directory(lock, resume=options.resume, checkpoints=options.checkpoints))
            self.checkpoints = exits.enter_context(
                Checkpoints(options.checkpoints, keep_last=keep_last, keep_best=keep_best, best=best, frozen=frozen)
            )
            if self._named is None:
                self._newest = self.checkpoints.latest_step()
            else:
                self._newest = self.checkpoints.verify(self._named)
            self._exit = exits.pop_all()

    def __enter__(self) -> "Run":
        self._exit.callback(lambda: self._progress.close())
        self._exit.push(self._close_metrics)
        self._exit.enter_context(self._profile or contextlib.nullcontext())
        self._exit.enter_context(self._watchdog or contextlib.nullcontext())
        self._exit.enter_context(self._interrupt)
        if jax.process_index() == 0:
            write_json(self.directory / "env.json", collect_environment())
            if self._newest is None:
                self._truncate_metrics(0)
                write_json(self.directory / "config.json", self.config)
        if self._model is not None:
            self.print_line(self._describe())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._exit.__exit__(kind, error, at)

    def restore(self, like: PyTree, batches: BatchIterator | None = None) -> PyTree:
        """Return the state of the newest whole checkpoint, or of the one that `resume` names, and move `batches` to its
        position. Without a checkpoint, return `like` itself; a run to resume says that it starts anew.

        `like` is the initial state, already placed. Metrics of later steps are truncated: the run writes them again.
        The digest of the data of `batches`, if they have one, goes into the configuration, as `text_digest`, and so do
        the counts of their records, as `records`, and the values that loading them chose, such as `chat_date`.
        **Raises** `ValueError` if the checkpoint is of another model, or was trained on other `frozen` parameters or
        another text; the directory stays as it is.
        """
        digest = getattr(batches, "digest", None)
        if digest is not None:
            self.config["text_digest"] = digest
        counts = getattr(batches, "counts", None)
        if counts:
            self.config["records"] = to_jsonable(counts)
        chosen = getattr(batches, "chosen", {})
        self.config.update(chosen)
        if self._newest is None:
            if self._is_resumed:
                place = self._checkpoint_folder if isinstance(self._checkpoint_folder, str) else self.directory
                self.print_line(f"{place} holds no checkpoint: starting at step 1")
            if digest is not None and jax.process_index() == 0:
                write_json(self.directory / "config.json", self.config)
            return like
        saved = self.checkpoints.read_config(self._named)
        differences = diff_configs(saved, self.config)
        if digest is not None and saved.get("text_digest") not in (None, digest):
            lines = [line for line in differences if line.partition(":")[0] in ("text_digest", *chosen)]
            raise ValueError(
                f"{self.directory} was trained on another text: {'; '.join(lines)}. Resume it with that text and "
                "tokenizer, or choose another folder (--out)"
            )
        for line in differences:
            self.print_line(f"resumed with another configuration: {line}")
        self.step, state, data, _ = self.checkpoints.restore(like, self._named)
        if batches is not None:
            if data is None:
                raise ValueError(
                    f"{self.directory}: step {self.step} was saved without batches: where they stood is lost"
                )
            batches.restore(data)
        if jax.process_index() == 0:
            self._truncate_metrics(self.step)
            write_json(self.directory / "config.json", self.config)
            if differences:
                self._rate_before = read_learning_rate(self.directory / "metrics.jsonl")
            else:
                self._rate_before = None
        return state

    def steps(
        self, batches: BatchIterator, total: int, *, placed: bool = True, tokens: int = 0, flops: float | int = 0
    ) -> Iterator[Any]:
        """Yield a batch for each step up to `total`, placed on the run's mesh if it has one; stop early on a signal.

        - `placed`: False for batches that the loop itself makes rows of, such as prompts.
        - `tokens`, `flops`: per step, over all processes, for the speed shown. By default the tokens of a placed batch,
          and the FLOPs of the run's model for these (`count_step_flops`). On a known chip they give the MFU.
        """
        if self._newest is not None and self.step == 0:
            raise RuntimeError("this run is resumed: call run.restore before run.steps")
        if self._model is not None and isinstance(batches, ShuffledBatches):
            self.print_line(str(batches))
        self.total = total
        devices = jax.devices() if self.mesh is None else list(self.mesh.devices.devices.flat)
        self._pace = Throughput(total, tokens=tokens, flops=flops, peak=find_peak_flops(devices))
        if jax.process_index() == 0:
            self._trackers.open()
            self._progress = make_progress(total, start=self.step)
        first = self.step + 1
        while self.step < total and not self.stopped:
            if self._watchdog is not None:
                self._watchdog.restart()
            with self._profile_step():
                batch = next(batches)
                if placed and self.mesh is not None:
                    batch = place_batch(batch, self.mesh, vocab=getattr(self.data, "vocab", None))
                    if self.step + 1 == first:
                        self._measure_step(batch)
                self.step += 1
                # Read once a step, before its body: whoever asks within the step gets the same answer.
                if jax.process_count() == 1 or self.step % self._every == 0:
                    self.stopped = self._interrupt.requested = is_set_on_any_process(self._interrupt.requested)
                yield batch
            if self.step == first:  # after compilation: the only step that the loop waits for
                self._show_finite_metrics(self.metrics.flush())
        if self._profile is not None:
            self._profile.close()
        if self.stopped:
            self.print_line(
                f"stopped by a signal after step {self.step} of {total}: --resume goes on from the last checkpoint"
            )

    def log(self, **values: Value) -> None:
        """Log numbers or device arrays under the current step, without waiting for the device."""
        if self._best_metric in values:
            self._best_value = self.step, values[self._best_metric]
        self._show_finite_metrics(self.metrics.log(self.step, **values))

    def every(self, steps: int) -> bool:
        """Return True if the current step is a multiple of `steps`, or the last."""
        return self.step % steps == 0 or self.step == self.total

    def due(self, steps: int) -> bool:
        """Return True if it is time to save: `every(steps)`, or the run is about to stop."""
        return self.every(steps) or self.stopped

    def save(self, state: PyTree, batches: BatchIterator | None = None, *, metric: float | int | None = None) -> None:
        """Save `state` after the current step and the position of `batches`, while the loop continues.

        `metric` ranks the checkpoint; by default the value of `best_metric` that this step logged, if it did.
        """
        if metric is None and self._best_value is not None and self._best_value[0] == self.step:
            metric = float(self._best_value[1])
        self._show_finite_metrics(self.metrics.flush())
        self._require_finite(find_nonfinite_metrics([to_jsonable(dict(step=self.step, metric=metric))]))
        self._require_finite(find_nan_arrays(state, step=self.step))
        data = None if batches is None else batches.state
        try:
            self.checkpoints.wait()
        except UnwrittenCheckpointError as error:
            _log.warning("%s; the run goes on", error)
        try:
            self.checkpoints.save(self.step, state, data=data, config=self.config, metric=metric)
        except UnwrittenCheckpointError as error:
            if self.stopped or self.step >= self.total:
                raise
            _log.warning("%s; the run goes on, and tries again at the next checkpoint", error)

    def print_line(self, text: str) -> None:
        """Show a line of text that stays."""
        self._progress.print_line(text)

    def finish(
        self,
        model: Any,
        *,
        before: Mapping[str, float] | None = None,
        prompts: Sequence[str | HeldOutPrompt] = (),
        key: Key[Array, ""] | None = None,
        samples: Sequence[tuple[str, str]] = (),
        export_seq_len: int | None = None,
        unit: str | None = None,
    ) -> None:
        """Sample, write `results.json`, print the result, and export the model if asked.

        - `before`: an evaluation before training, `{name: value}`. Without it only "validation" is reported.
        - `unit`: of these values, by default the unit of the run's data.
        - `prompts`: continued by `model` with `key`; `samples` are earlier prompts and continuations, shown before.
        - `export_seq_len`: `export` the model, for contexts of this length.

        Call it in every process after the `with` block; only the first one writes. A run that was stopped writes and
        prints nothing. `zoo.tools.report_run` calls it and draws a report. **Raises** `KeyError` if a metric of
        `before`, or "validation" without it, was not logged.
        """
        if self.stopped:
            return
        if self.mesh is None:
            raise ValueError("the results of a run name its mesh: train.Run(..., mesh=mesh)")
        if jax.process_index() == 0:
            (self.directory / "results.json").unlink(missing_ok=True)
        try:
            if prompts and key is not None:
                with self._name_interruption("sampling"):
                    samples = [*samples, *continue_prompts(model, self.data, prompts, mesh=self.mesh, key=key)]
        finally:  # also of a model that trains, and cannot decode yet
            if jax.process_index() == 0:
                options = {"unit": unit or self.data.unit, "before": before, "samples": samples}
                write_results(self.directory, model, self.mesh, steps=self.step, **options)
        if export_seq_len is not None:
            self.export(model, seq_len=export_seq_len)

    def export(self, model: Any, *, seq_len: int, source: Path | None = None, **entries: Any) -> None:
        """Export `model` and the run's tokenizer to `export/`, for contexts of `seq_len` tokens, and say so.

        `source` is the directory that the model was loaded from, as for `zoo.save`; `entries` are further ones of its
        config.json.

        For a model that no family of checkpoints holds, prints a line that says so, and where its weights are.
        """
        if self.stopped:
            return
        with self._name_interruption("exporting"):
            weights = self._find_newest_checkpoint()
            training = describe_training(self.config, self.step)
            path = self.directory / "export"
            options = {"source": source, "weights": weights, "training": training, **entries}
            export_result(model, self.data, path, seq_len=seq_len, **options)

    def export_adapters(self, model: Any, *, base: str | Path) -> Any:
        """Write the adapters of `model`, of the checkpoint `base`, to `adapter/`, with the run's tokenizer; return the
        model with them merged. A model without adapters, and the model of a stopped run, is returned as it is."""
        if self.stopped:
            return model
        training = describe_training(self.config, self.step)
        return export_adapters(model, self.data, self.directory / "adapter", base=base, training=training)

    def _describe(self) -> str:
        """Return the first lines of a run: its name, the size of its model, the mesh and the data."""
        name = "" if self.name is None else f"{self.name}: "
        place = "" if self.mesh is None else f" on {self.mesh}"
        data = "" if self.data is None else f"\n{self.data}"
        kind = "trained parameters" if adapter_names(self._model) else "parameters"
        return f"{name}{count(self._model):,} {kind}{place}{data}"

    def _measure_step(self, batch: Any) -> None:
        """Count the tokens and FLOPs of a step, unless they were given."""
        if not isinstance(batch, Mapping) or "tokens" not in batch:
            return
        self._pace.tokens = self._pace.tokens or batch["tokens"].size
        if self._model is not None:
            self._pace.flops = self._pace.flops or count_step_flops(self._model, batch["tokens"])

    def _profile_step(self) -> contextlib.AbstractContextManager:
        if self._profile is None:
            return contextlib.nullcontext()
        return self._profile.step(self.step + 1)

    def _find_newest_checkpoint(self) -> str | None:
        """Return the path or URL of the newest whole checkpoint."""
        newest = max(self.checkpoints.restorable_steps(), default=None)
        return None if newest is None else f"{self._checkpoint_folder}/{newest}"

    @contextlib.contextmanager
    def _name_interruption(self, doing: str) -> Iterator[None]:
        """Let the message of Ctrl-C say what it interrupted, and where the model is."""
        try:
            yield
        except KeyboardInterrupt:
            checkpoint = self._find_newest_checkpoint()
            if checkpoint:
                saved = f"; the model is in {checkpoint}, and --resume does this again"
            else:
                saved = ""
            raise KeyboardInterrupt(f"interrupted while {doing}{saved}") from None

    def _show_metrics(self, lines: Sequence[Record]) -> None:
        if lines:
            newest = lines[-1]
            pace = self._pace.tick(newest["step"])
            values = {name: value for line in lines for name, value in line.items() if name != "step"}
            if self._rate_before is not None and "learning_rate" in values:
                first = np.max(next(line["learning_rate"] for line in lines if "learning_rate" in line))
                self.print_line(
                    f"learning rate {self._rate_before:.3g} before, {first:.3g} now: the schedule of {self.total} steps"
                )
                self._rate_before = None
            self._progress.update(newest["step"], values, pace)
            if jax.process_index() == 0:
                self._timing.append([dict(step=newest["step"]) | pace])

    def _show_finite_metrics(self, lines: Sequence[Record]) -> None:
        self._show_metrics(lines)
        self._require_finite(find_nonfinite_metrics(lines, max_skipped=self._max_skipped))

    def _require_finite(self, found: str | None) -> None:
        if found is not None:
            self.stopped = True  # so that `finish` writes nothing
            with contextlib.suppress(UnwrittenCheckpointError):
                self.checkpoints.wait()
            steps = self.checkpoints.folder.list_whole_steps()
            raise FloatingPointError(f"{self.directory}: {found}; {describe_retry(steps)}")

    def _close_metrics(self, kind: type[BaseException] | None, *_: object) -> None:
        lines = self.metrics.flush()
        self._show_metrics(lines)
        self.metrics.close()
        if kind is None:
            self._require_finite(find_nonfinite_metrics(lines, max_skipped=self._max_skipped))

    def _truncate_metrics(self, step: int) -> None:
        for name in ("metrics.jsonl", "timing.jsonl"):
            truncate_after(self.directory / name, step)
