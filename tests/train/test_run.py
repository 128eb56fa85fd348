"""Runs: killed or stopped and resumed, they write bit for bit the metrics of an uninterrupted run."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zoo import train
from zoo.text.batches import CorpusSplit
from zoo.train.progress import (
    LineProgress,
    Progress,
    ProgressBar,
    SilentProgress,
    Throughput,
    format_duration,
    format_metrics,
    format_si,
)

STEPS = 30


def toy(out: Path, *, resume: bool = False, width: int = 8, strike: tuple[int, int] = (0, 0)) -> train.Run:
    """Thirty steps of a bigram model; at step strike[0] the process sends itself the signal strike[1]."""
    tokens = np.random.default_rng(0).integers(0, 4, 3000).astype(np.uint8)
    split = CorpusSplit("train", tokens, np.ones(16, np.int64), text_bytes=3000, text_tokens=3000)
    batches = split.batches(seq_len=16, batch_size=4)
    optimizer = optax.adam(1e-2)
    table = jax.random.normal(jax.random.key(0), (16, width)), jnp.zeros((width, 16))
    opt_state = optimizer.init(table)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, table, opt_state):
        def loss_fn(table):
            losses = optax.softmax_cross_entropy_with_integer_labels(
                table[0][batch["tokens"]] @ table[1], batch["targets"]
            )
            return (losses * batch["weights"]).sum() / batch["weights"].sum()

        loss, grads = jax.value_and_grad(loss_fn)(table)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(table, updates), opt_state, loss

    options = train.RunOptions(out, resume=resume)
    with train.Run(options, config=dict(width=width, resume=resume), fetch_every=4) as run:
        table, opt_state = run.restore((table, opt_state), batches)
        for batch in run.steps(batches, STEPS, tokens=64, flops=1e6):
            table, opt_state, loss = step(batch, table, opt_state)
            run.log(loss=loss)
            if run.every(10):
                run.log(validation=jnp.sum(table[1] ** 2))
            if run.step == strike[0]:
                os.kill(os.getpid(), strike[1])
            if run.due(5):
                run.save((table, opt_state), batches, metric=float(loss))
    return run


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> bytes:
    out = tmp_path_factory.mktemp("unbroken")
    toy(out)
    return (out / "metrics.jsonl").read_bytes()


def test_run_metrics_uninterrupted(unbroken):
    lines = [json.loads(line) for line in unbroken.splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if "validation" in line] == [10, 20, 30]
    assert set(lines[0]) == {"step", "loss"} and lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.ci
def test_run_killed_and_resumed_is_bitwise_equal(tmp_path, unbroken):
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / "metrics.jsonl").read_bytes() != unbroken
    run = toy(tmp_path, resume=True)
    assert run.step == STEPS and (tmp_path / "metrics.jsonl").read_bytes() == unbroken


def test_run_stopped_and_resumed_is_bitwise_equal(tmp_path, unbroken, capsys):
    run = toy(tmp_path, strike=(12, signal.SIGTERM))
    assert run.stopped and run.step == 13 and run.checkpoints.directory.joinpath("13").exists()
    assert "stopped by a signal after step 13 of 30: --resume goes on" in capsys.readouterr().out
    run = toy(tmp_path, resume=True)
    assert not run.stopped and run.step == STEPS and (tmp_path / "metrics.jsonl").read_bytes() == unbroken
    assert [line["step"] for line in train.read_metrics(tmp_path / "timing.jsonl")][-1] == STEPS


def test_run_files_and_refusals(tmp_path, capsys):
    toy(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"width": 8}
    env = json.loads((tmp_path / "env.json").read_text())
    assert env["packages"]["jax"] == jax.__version__ and sum(env["devices"].values()) == jax.device_count()
    with pytest.raises(FileExistsError, match=r"holds a run of 30 steps: resume it \(--resume\), or choose another"):
        toy(tmp_path)
    with pytest.raises(ValueError, match=r"\[0\]\[0\]: float32 \[16, 8\] in the checkpoint, float32 \[16, 9\] here"):
        toy(tmp_path, resume=True, width=9)
    assert "resumed with another configuration: width: 8 in the checkpoint, 9 now\n" in capsys.readouterr().out
    assert len(train.read_metrics(tmp_path / "metrics.jsonl")) == STEPS
    options = train.RunOptions(tmp_path, resume=True)
    with train.Run(options, config={}) as run, pytest.raises(RuntimeError, match=r"call run.restore"):
        next(run.steps(train.ShuffledBatches(train.TokenWindows(np.zeros(9, np.uint8), 2), 1), 3))


@dataclass(frozen=True)
class Config:
    width: int = 8
    run: train.RunOptions = train.RunOptions(Path("runs/a"))


def test_run_by_name_has_its_folder_and_its_name_in_config(tmp_path):
    config = Config(run=train.RunOptions(tmp_path, seed=3))
    with train.Run(config.run, config=config, name="wide") as run:
        assert run.directory == tmp_path / "wide"
    saved = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert saved == {"width": 8, "out": str(tmp_path), "seed": 3, "track": [], "run": "wide"}


def test_run_resume_without_checkpoint_starts_at_step_1(tmp_path, unbroken, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n{"st')
    toy(tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == unbroken
    said = "holds no checkpoint: starting at step 1\n"
    assert f"{tmp_path} {said}" in capsys.readouterr().out
    toy(tmp_path, resume=True)
    toy(tmp_path / "new")
    assert said not in capsys.readouterr().out


class Counter:
    """A data iterator: 1, 2, 3, ..."""

    state = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.state += 1
        return self.state

    def restore(self, state):
        self.state = state


def run_sum(
    out: Path, *, resume: bool | int = False, steps: int = 8, metrics: dict | None = None, spoiled: int = 0, **options
):
    """Sum up the batches, saving every second step; `metrics` by step, and a step whose sum is spoiled with NaN."""
    batches, state = Counter(), {"sum": jnp.zeros(3)}
    with train.Run(train.RunOptions(out, resume=resume), config={"a": 1}, fetch_every=3, **options) as run:
        state = run.restore(state, batches)
        for batch in run.steps(batches, steps):
            state = {"sum": state["sum"] + (jnp.nan if run.step == spoiled else batch)}
            run.log(**(metrics or {}).get(run.step, {"loss": 1.0}))
            if run.due(2):
                run.save(state, batches)
    return run, float(state["sum"][0])


def run_schedule(out: Path, *, steps: int, resume: bool = False, peak: float | np.ndarray = 1.0) -> None:
    """Log a learning rate that falls linearly to 0 at the last step, or the rates of a sweep."""
    batches, state = Counter(), {"sum": jnp.zeros(3)}
    with train.Run(train.RunOptions(out, resume=resume), config={"steps": steps}) as run:
        state = run.restore(state, batches)
        for _ in run.steps(batches, steps):
            run.log(learning_rate=peak * (1 - run.step / steps))
        run.save(state, batches)


@pytest.mark.parametrize("peak", [1.0, np.array([0.5, 1.0, 0.25])], ids=["one run", "sweep"])
def test_a_run_resumed_for_longer_tells_the_jump_of_its_schedule(tmp_path, capsys, caplog, peak):
    run_schedule(tmp_path, steps=4, peak=peak)
    capsys.readouterr()
    run_schedule(tmp_path, steps=8, resume=True, peak=peak)
    out = capsys.readouterr().out
    assert "resumed with another configuration: steps: 4 in the checkpoint, 8 now\n" in out
    assert out.count("learning rate 0 before, 0.375 now: the schedule of 8 steps\n") == 1
    assert not caplog.records, "a flag that was given is no cause for a warning"
    run_schedule(tmp_path, steps=8, resume=True, peak=peak)
    assert "before" not in capsys.readouterr().out


def test_ctrl_c_in_the_export_says_where_the_model_is(tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    run, _ = run_sum(tmp_path)
    monkeypatch.setattr("zoo.train.run.export_result", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        run.export(None, seq_len=8)
    checkpoint = tmp_path / "checkpoints" / "8"
    assert (
        str(caught.value) == f"interrupted while exporting; the model is in {checkpoint}, and --resume does this again"
    )


def held(out: Path) -> list[str]:
    return sorted(os.listdir(out / "checkpoints"))


def test_run_stops_at_the_first_nan_and_goes_on_from_before(tmp_path):
    """The loss is NaN in step 5, and fetched with that of step 6: before step 6 is saved."""
    says = r"loss is nan in step 5; the run stopped and saved nothing after step 4: .* --resume, or from 2 by --resume"
    with pytest.raises(FloatingPointError, match=says):
        run_sum(tmp_path, metrics={5: {"loss": jnp.nan}})
    assert held(tmp_path) == ["2", "4"]
    assert [line["loss"] for line in train.read_metrics(tmp_path / "metrics.jsonl")] == [1, 1, 1, 1, "nan", 1]
    _, total = run_sum(tmp_path, resume=True)
    assert total == 36 and len(train.read_metrics(tmp_path / "metrics.jsonl")) == 8


@pytest.mark.parametrize("step", [1, 8])
def test_run_of_a_nan_saves_and_reports_nothing(tmp_path, step):
    """In the first step, and in the last one, whose metrics are fetched at the end."""
    with (
        train.Run(tmp_path, config={}) as run,
        pytest.raises(FloatingPointError, match=f"validation is inf in step {step}"),
    ):
        for _ in run.steps(Counter(), 8):
            run.log(validation=jnp.inf if run.step == step else 1.0)
            if run.step == 8:
                run.save({"x": jnp.ones(2)}, Counter())
    assert not (tmp_path / "checkpoints").exists()
    assert run.stopped  # and a stopped run reports nothing
    with (
        pytest.raises(FloatingPointError, match="start again with another learning rate"),
        train.Run(tmp_path, config={}) as run,
    ):
        for _ in run.steps(Counter(), 8):
            run.log(loss=jnp.nan if run.step == step else 1.0)


def test_run_saves_no_nan_of_a_finite_loss(tmp_path):
    with pytest.raises(
        FloatingPointError, match=r"NaN in sum of the state after step 6; .* saved nothing after step 4"
    ):
        run_sum(tmp_path, spoiled=6)
    assert held(tmp_path) == ["2", "4"]
    with (
        pytest.raises(FloatingPointError, match="metric is nan in step 2"),
        train.Run(tmp_path / "b", config={}) as run,
    ):
        for _ in run.steps(Counter(), 2):
            if run.due(2):
                run.save({"x": jnp.ones(2)}, metric=float("nan"))


def test_run_resumes_from_the_named_step(tmp_path):
    run_sum(tmp_path)
    assert held(tmp_path) == ["6", "8"]
    with pytest.raises(FileNotFoundError, match=r"no whole checkpoint of step 4 here; it holds \[6, 8\]"):
        run_sum(tmp_path, resume=4)
    _, total = run_sum(tmp_path, resume=6, steps=7)
    assert total == 28 and held(tmp_path) == ["6", "7"]
    with pytest.raises(FileNotFoundError, match=r"no whole checkpoint of step 2 here; it holds none"):
        run_sum(tmp_path / "new", resume=2)


def test_run_keeps_the_best_of_before_the_resume(tmp_path):
    metrics = {2: {"validation": 3.0}, 4: {"validation": 1.0}, 6: {"validation": 2.0}, 8: {"validation": 4.0}}
    run_sum(tmp_path, steps=4, metrics=metrics)
    for steps in (6, 8, 12):
        run_sum(tmp_path, steps=steps, metrics=metrics, resume=True)
    assert held(tmp_path) == ["10", "12", "4"]
    for steps in (4, 12):
        run_sum(tmp_path / "rewards", steps=steps, metrics=metrics, resume=steps > 4, best="highest")
    assert held(tmp_path / "rewards") == ["10", "12", "8"]


class DatedBatches(Counter):
    """Batches of a text that depends on the day."""

    def __init__(self, day):
        self.digest = f"of {day}"
        self.chosen = {"chat_date": day}


@dataclass(frozen=True)
class DatedConfig:
    records: train.RecordOptions = train.RecordOptions()
    run: train.RunOptions = train.RunOptions(Path("runs/dated"))


def test_run_keeps_what_loading_chose(tmp_path):
    def start(day, **flags):
        batches = DatedBatches(day)
        with train.Run(train.RunOptions(tmp_path, **flags), config=DatedConfig()) as run:
            run.restore({"sum": jnp.zeros(3)}, batches)
            if not flags:
                assert json.loads((tmp_path / "config.json").read_text())["chat_date"] == day
                run.save({"sum": jnp.zeros(3)}, batches)

    start("2026-01-31")
    start("2026-01-31", resume=True)
    resumed = train.run_cli(lambda config: config, DatedConfig, arguments=["--resume", "--out", str(tmp_path)])
    assert resumed.records.chat_date == "2026-01-31"
    with pytest.raises(ValueError, match="text: chat_date: 2026-01-31 in the checkpoint, 2026-02-01 now; text_"):
        start("2026-02-01", resume=True)


def test_run_passes_over_damaged_checkpoints(tmp_path, caplog):
    _, total = run_sum(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for step in ("8", "6"):
        path = tmp_path / "checkpoints" / step / "about" / "metadata"
        path.write_bytes(path.read_bytes().replace(b'"step"', b'"stop"'))
        if step == "8":
            _, again = run_sum(tmp_path, resume=True)
            assert again == total and "8: passed over, the bytes of about/metadata have changed" in caplog.text
            path.write_bytes(path.read_bytes().replace(b'"step"', b'"stop"'))
    with pytest.raises(FileNotFoundError, match="all are damaged, and nothing was deleted"):
        run_sum(tmp_path, resume=True)
    with pytest.raises(FileExistsError, match="holds a run of 8 steps"):
        run_sum(tmp_path)
    assert held(tmp_path) == ["6", "8"] and (tmp_path / "metrics.jsonl").read_bytes() == before


def test_run_outlasts_damage_of_its_other_files(tmp_path, caplog):
    """No checkpoint is lost for a damaged configuration, environment or line of metrics; the line is kept beside."""
    run_sum(tmp_path, steps=6)
    for name in ("config.json", "env.json", "timing.jsonl"):
        (tmp_path / name).write_bytes(b'\0\0{"a": \xff')
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[1] = b"\0" * 20 + b"\xff" + lines[1][10:]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines) + b"\0\0\0")
    _, total = run_sum(tmp_path, resume=True)
    assert total == 36 and "metrics.jsonl, line 2: passed over, not JSON" in caplog.text
    assert [line["step"] for line in train.read_metrics(tmp_path / "metrics.jsonl")] == [1, 3, 4, 5, 6, 7, 8]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes().splitlines(keepends=True)[:6] == lines
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}


def test_run_is_alone_in_its_directory(tmp_path):
    run_sum(tmp_path, steps=2)
    with train.Run(train.RunOptions(tmp_path, resume=True), config={}) as run:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(
            BlockingIOError, match=f"is in use by process {os.getpid()} on {socket.gethostname()} since"
        ):
            run_sum(tmp_path, resume=True)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        run.restore({"sum": jnp.zeros(3)})
    assert run_sum(tmp_path, resume=True)[1] == 36 and not (tmp_path / "run.lock").exists()


def test_run_goes_on_when_the_disk_is_full(tmp_path, caplog, monkeypatch):
    """Room for the checkpoint of step 2 only; again before the one of step 8, or not: then it fails, and resumes."""
    free = iter([10**9, 9, 9, 9, 9, 10**9])
    usage = lambda path: shutil._ntuple_diskusage(10**9, 0, next(free, 9))
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", usage)
        run_sum(tmp_path)
    assert held(tmp_path) == ["2", "8"]
    lines = [record.message for record in caplog.records]
    assert [line.partition("step ")[2][0] for line in lines] == ["4", "6"]
    assert (
        "its arrays take 12B, and 9B are free; the newest whole one is of step 2; the run goes on, and tries"
        in lines[0]
    )
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", usage)
        with pytest.raises(OSError, match="no room for the checkpoint of step 9: its arrays take 12B, and 9B are free"):
            run_sum(tmp_path, steps=9, resume=True)
    assert held(tmp_path) == ["2", "8"] and run_sum(tmp_path, steps=9, resume=True)[1] == 45


def test_progress_prints_plain_lines(tmp_path, capsys):
    toy(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0].startswith("first step (compiles")
        and lines[1].startswith(" 1/30  loss 2.")
        and lines[2].startswith(" 4/30  loss 2.")
    )
    assert lines[-1].startswith("30/30  loss 1.") and "tokens/s" in lines[-1] and "FLOP/s" in lines[-1]
    assert "left" in lines[2]


def test_run_shows_its_first_step_at_once(tmp_path, capsys, monkeypatch):
    toy(tmp_path, strike=(12, signal.SIGTERM))
    capsys.readouterr()
    toy(tmp_path, resume=True)  # from step 13, in the middle of four
    steps = [line.split("/")[0].strip() for line in capsys.readouterr().out.splitlines()[1:]]
    assert steps == ["14", "15", "16", "20", "24", "25", "28", "30"]


def test_progress_of_every_kind(capsys):
    for shown in (ProgressBar(10, start=2), LineProgress(10), SilentProgress()):
        assert isinstance(shown, Progress)
        shown.update(5, {"loss": 1.0}, Throughput(10).tick(5))
        shown.print_line("a line [that] stays")
        shown.close()
    assert capsys.readouterr().out.count("a line [that] stays") == 2


def test_progress_formats_numbers():
    pace = dict(seconds=9.0, tokens_per_second=51234.0, flops_per_second=3.1e11, seconds_left=65.2)
    wanted = "loss 1.234  bits per byte 1e-05  1:05 left  51.2k tokens/s  310G FLOP/s"
    assert format_metrics({"loss": 1.2341, "bits_per_byte": 1e-5}, pace) == wanted
    assert [format_duration(59.6), format_duration(3723)] == ["1:00", "1:02:03"]
    assert [format_si(x) for x in (0.0, 0.5, 999.0, 1e3, 2.5e15)] == ["0", "0.5", "999", "1k", "2.5P"]


if __name__ == "__main__":
    toy(Path(sys.argv[1]), strike=(17, signal.SIGKILL))
