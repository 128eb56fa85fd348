"""Runs: killed or stopped and resumed, they write bit for bit the metrics of an uninterrupted run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zoo import train
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
    split = train.CorpusSplit("train", tokens, np.ones(16, np.int64), text_bytes=3000, text_tokens=3000)
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


def test_run_files_and_refusals(tmp_path, caplog):
    toy(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"width": 8}
    env = json.loads((tmp_path / "env.json").read_text())
    assert env["packages"]["jax"] == jax.__version__ and sum(env["devices"].values()) == jax.device_count()
    with pytest.raises(FileExistsError, match=r"holds a run of 30 steps: resume it \(--resume\), or choose another"):
        toy(tmp_path)
    with pytest.raises(ValueError, match=r"\[0\]\[0\]: float32 \[16, 8\] in the checkpoint, float32 \[16, 9\] here"):
        toy(tmp_path, resume=True, width=9)
    assert "the configuration differs: width: 8 in the checkpoint, 9 now" in caplog.text
    assert len(train.read_metrics(tmp_path / "metrics.jsonl")) == STEPS
    options = train.RunOptions(tmp_path, resume=True)
    with train.Run(options, config={}) as run, pytest.raises(RuntimeError, match=r"call run.restore"):
        next(run.steps(train.ShuffledBatches(train.TokenWindows(np.zeros(9, np.uint8), 2), 1), 3))


def test_run_resume_without_checkpoint_starts_at_step_1(tmp_path, unbroken):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n{"st')
    toy(tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == unbroken


def test_progress_prints_plain_lines(tmp_path, capsys):
    toy(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "compiling" and lines[1].startswith(" 1/30  loss 2.") and lines[2].startswith(" 4/30  loss 2.")
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
