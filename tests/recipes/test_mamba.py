"""The recipe as its users run it: both generations, stopped and resumed, on eight devices; and what it exports."""

import os
import signal

import jax.numpy as jnp
import pytest

import zoo
from recipes import mamba
from tests.recipes.flags import MESH_FLAGS, RUN_FLAGS, call, flag_names, unexplained_flags
from tests.recipes.optimization import check_optimization
from zoo import train

pytestmark = pytest.mark.ci

TINY = {
    "embed": 16, "layers": 1, "state_dim": 4, "head_dim": 8, "seq_len": 16, "batch_size": 8, "steps": 4,
    "warmup_steps": 1, "eval_every": 2, "remat": "none", "tensor": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"{number} cats sat on the mat and saw that it was flat " * 10)
    return folder


def test_mamba_exports_and_reports(text, tmp_path, without_samples):
    call(mamba.main, data=(text,), out=tmp_path / "run", **TINY)
    check_optimization(tmp_path / "run")
    assert "bytes of decoding state" in (tmp_path / "run" / "report.html").read_text()
    model = zoo.load(tmp_path / "run" / "export")
    assert type(model.stack.segments[0].blocks[0].mixer).__name__ == "Mamba2"
    assert jnp.isfinite(model(jnp.zeros((1, 5), int))).all()


@pytest.mark.slow
@pytest.mark.parametrize("generation", [1, 2])
def test_mamba_resumes_bitwise_and_exports(generation, text, tmp_path, monkeypatch):
    """Stopped after two steps and resumed, it is the unbroken run bit for bit; and the export is the model."""
    log = train.Run.log

    def struck(run, **values):
        if run.step == 2 and "bits_per_byte" in values:
            os.kill(os.getpid(), signal.SIGTERM)
        log(run, **values)

    options = {"data": (text,), "generation": generation} | TINY
    call(mamba.main, out=tmp_path / "unbroken", **options)
    with monkeypatch.context() as patch:
        patch.setattr(train.Run, "log", struck)
        call(mamba.main, out=tmp_path / "run", **options)
    assert not (tmp_path / "run" / "report.html").exists()
    call(mamba.main, out=tmp_path / "run", resume=True, **options)
    lines, expected = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("run", "unbroken"))
    assert lines == expected
    check_optimization(tmp_path / "run")
    assert "bytes of decoding state" in (tmp_path / "run" / "report.html").read_text()
    model = zoo.load(tmp_path / "run" / "export")
    assert type(model.stack.segments[0].blocks[0].mixer).__name__ == ("Mamba2" if generation == 2 else "Mamba")
    assert jnp.isfinite(model(jnp.zeros((1, 5), int))).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 7}, "does not divide evenly over heads 7 wide"),
        ({"batch_size": 6}, "6 rows do not divide evenly over data=4"),
    ],
)
def test_mamba_bad_flags_raise_early(text, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        call(mamba.main, data=(text,), out=tmp_path / "run", **TINY | changes)
    assert not (tmp_path / "run").exists()


FLAGS = [
    *("generation", "data", "vocab", "embed", "layers", "state_dim", "head_dim", "expand", "seq_len"),
    *("batch_size", "steps", "learning_rate", "warmup_steps", "weight_decay", "eval_every"),
    *MESH_FLAGS,
    *RUN_FLAGS,
]


def test_mamba_flags_are_explained(capsys):
    assert flag_names(mamba.main) == FLAGS
    with pytest.raises(SystemExit):
        train.run_cli(mamba.main, mamba.Config, arguments=["--generation", "3"])
    assert "invalid choice" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train.run_cli(mamba.main, mamba.Config, mamba.PRESETS, arguments=["--help"])
    printed = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')} " in printed for name in FLAGS)
    assert unexplained_flags(mamba.main) == []
