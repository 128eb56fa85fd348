"""The recipe as its users run it: two runs and their report; all four, resumed, and a copy on one device."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from recipes import moe
from tests.processes import make_environment
from tests.recipes.flags import call
from tests.recipes.optimization import check_optimization
from zoo import train
from zoo.cli import main as command

pytestmark = pytest.mark.ci

TINY = {
    "embed": 16, "layers": 2, "heads": 4, "mlp_dim": 16, "experts": 4, "seq_len": 16, "batch_size": 8, "steps": 4,
    "warmup_steps": 1, "eval_every": 2, "remat": "none",
}  # fmt: skip


def train_runs(text, out, runs):
    call(moe.main, data=(text,), out=out, runs=runs, balance_weight=0.5, bias_rate=0.5, tensor=2, **TINY)
    return out


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    return train_runs(text, tmp_path_factory.mktemp("unbroken") / "run", moe.RUNS)


def read_runs(out, runs=moe.RUNS):
    return {name: train.read_metrics(out / name / "metrics.jsonl") for name in runs}


@pytest.mark.parametrize("runs", [("dense", "loss-free"), pytest.param(moe.RUNS, marks=pytest.mark.slow)])
def test_moe_runs_and_their_report(text, tmp_path, runs):
    out = train_runs(text, tmp_path / "run", runs)
    for name, lines in read_runs(out, runs).items():
        assert [line["step"] for line in lines if "validation" in line] == [2, 4]
        assert lines[-1]["loss"] < lines[0]["loss"]
        assert all(np.sum(line["visits"], -1).tolist() == [8 * 16 * 2] * 2 for line in lines if "visits" in line)
        assert all(("visits" in line) == (name != "dense") for line in lines)
        assert json.loads((out / name / "config.json").read_text())["run"] == name
    check_optimization(out, *runs)
    report = (out / "report.html").read_text()
    drawn = "largest load, of an even share against tokens", f">{runs[1]}</text>"
    assert all(part in report for part in (*drawn, "layers.*.mixture_of_experts.router"))
    assert "http" not in report


@pytest.mark.slow
def test_moe_variants_share_their_initialization(unbroken):
    first = {name: lines[0] for name, lines in read_runs(unbroken).items() if name != "dense"}
    visits = [line["visits"] for line in first.values()]
    assert visits[0] == visits[1] == visits[2]
    assert first["loss-free"]["loss"] == pytest.approx(first["unbalanced"]["loss"], abs=1e-5)
    # 0.5 experts Σ f P, where Σ f P is top / experts if all is even, and a little more here
    assert 0.98 < first["balance-loss"]["loss"] - first["unbalanced"]["loss"] < 1.3
    last = {name: lines[-1]["largest_load"] for name, lines in read_runs(unbroken).items() if name != "dense"}
    assert len(set(last.values())) == 3


@pytest.mark.slow
def test_moe_fork_gives_the_same_numbers_on_one_device(text, unbroken, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command(["fork", "moe", "mine.py"])
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    words = ["--runs", "dense", "loss-free", "--data", str(text), "--bias-rate", "0.5", "--profile", *flags]
    done = subprocess.run(
        [sys.executable, "mine.py", *words], env=make_environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "wrote the report to runs/mine/report.html" in done.stdout and "on one device" in done.stdout
    for name in ("dense", "loss-free"):
        expected, lines = (train.read_metrics(out / name / "metrics.jsonl") for out in (unbroken, Path("runs/mine")))
        assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], rel=2e-3)
        assert lines[0].get("visits") == expected[0].get("visits")
        assert list(Path("runs/mine", name).glob("profile/plugins/profile/*/perfetto_trace.json.gz"))


@pytest.mark.slow  # its code is that of test_transformer_combines_the_other_options
def test_moe_combines_the_other_options(text, tmp_path):
    options = {"vocab": 300, "runs": ("loss-free",), "dtype": "bfloat16", "microbatches": 2, "fsdp": 2, "tensor": 2}
    options |= {"remat": "dots", "steps": 1, "seq_len": 20}
    call(moe.main, data=(text,), out=tmp_path / "run", **TINY | options)
    assert {"loss-free", "report.html"} <= {path.name for path in (tmp_path / "run").iterdir()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 5}, "a token goes to at least 1 and at most all of 4 experts, not 5"),
        ({"experts": 0}, "a mixture has at least 1 expert, not 0"),
        ({"runs": ("dense", "sparse")}, "name one or more of the runs dense, unbalanced, .*, not dense, sparse"),
        ({"runs": ()}, "name one or more of the runs dense, .*, not none"),
        ({"mlp_dim": 18, "tensor": 4}, "mlp"),
        ({"batch_size": 12}, "12 rows do not divide evenly over data=8"),
    ],
)
def test_moe_bad_flags_raise_early(text, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        call(moe.main, data=(text,), out=tmp_path / "run", **TINY | changes)
    assert not (tmp_path / "run").exists()
