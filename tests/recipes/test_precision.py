"""The recipe as its users run it: every precision learns, the report has the curves and the rounding errors."""

import re

import pytest

from recipes import precision
from tests.recipes.flags import call
from tests.recipes.optimization import check_optimization
from zoo import train

pytestmark = pytest.mark.ci

TINY = {
    "embed": 16, "layers": 1, "heads": 2, "mlp_dim": 32, "seq_len": 16, "batch_size": 8, "steps": 4, "warmup_steps": 1,
    "eval_every": 2,
}  # fmt: skip


def run_methods(text, out, **options):
    call(precision.main, data=(text,), out=out, **TINY | options)
    return {name: train.read_metrics(out / name / "metrics.jsonl") for name in options["methods"]}


@pytest.mark.parametrize(
    "methods", [("bfloat16", "nearest"), pytest.param(("fp8-delayed", "stochastic"), marks=pytest.mark.slow)]
)
def test_precision_compares(methods, text, tmp_path, capsys):
    out = tmp_path / "run"
    records = run_methods(text, out, methods=methods)
    for lines in records.values():
        assert [line["step"] for line in lines if "validation" in line] == [2, 4]
        assert lines[-1]["loss"] < lines[0]["loss"]
        assert lines[0]["loss"] == pytest.approx(records[methods[-1]][0]["loss"], rel=0.02)
    check_optimization(out, *methods)
    printed, report = capsys.readouterr().out, (out / "report.html").read_text()
    sizes = {name: float(re.search(rf"{name} +[\d.]+ +([\d.]+)", printed)[1]) for name in methods}
    expected = {"bfloat16": 12, "nearest": 10, "fp8-delayed": 12, "stochastic": 6}
    assert sizes == pytest.approx({name: expected[name] for name in methods}, abs=0.3)
    assert "Rounding errors of each layer by itself" in report and "units of the last place" in report


@pytest.mark.slow
def test_all_precisions_come_near_float32(text, tmp_path):
    records = run_methods(text, tmp_path / "run", methods=tuple(precision.METHODS), steps=40, eval_every=40)
    exact = records["float32"][-1]["validation"]
    for name, lines in records.items():
        assert lines[-1]["validation"] == pytest.approx(exact, rel=0.05), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ("float8",)}, "name one or more of the methods float32, .*, not float8"),
        ({"dtype": "bfloat16"}, "--methods names the precisions, and --dtype bfloat16 would be ignored"),
    ],
)
def test_precision_bad_flags_raise_early(text, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        call(precision.main, data=(text,), out=tmp_path / "run", **TINY | changes)
    assert not (tmp_path / "run").exists()
