"""The recipe as its users run it: schedules with equal losses, their memory and collectives, drawn and resumed."""

import re

import pytest

from recipes import pipeline
from tests.recipes.flags import call
from tests.recipes.optimization import check_optimization
from zoo import train

pytestmark = pytest.mark.ci

TINY = {
    "runs": ("gpipe", "interleaved"), "embed": 16, "layers": 4, "heads": 2, "mlp_dim": 32, "seq_len": 16,
    "batch_size": 16, "steps": 3, "warmup_steps": 1, "eval_every": 2, "remat": "none", "pipe": 2, "microbatches": 4,
}  # fmt: skip


def test_pipeline_compares_schedules(text, tmp_path, capsys):
    out = tmp_path / "run"
    call(pipeline.main, data=(text,), out=out, **TINY)
    metrics = {name: out / name / "metrics.jsonl" for name in TINY["runs"]}
    losses = {name: [line["loss"] for line in train.read_metrics(path)] for name, path in metrics.items()}
    assert losses["interleaved"] == pytest.approx(losses["gpipe"], abs=1e-5)
    check_optimization(out, *TINY["runs"])
    printed, report = capsys.readouterr().out, (out / "report.html").read_text()
    gpipe, interleaved = (line.split() for line in printed.splitlines() if re.match(r" *(gpipe|interleaved) +\d", line))
    # 1 of 5 ticks is idle each way, and 1 of 9. Each sends once.
    assert gpipe[:4] == ["gpipe", "20.0%", "10", "4"] and interleaved[:4] == ["interleaved", "11.1%", "12", "5"]
    assert int(gpipe[5]) == 10 and int(interleaved[5]) > 10
    assert all(f"<h2>{name}</h2>" in report for name in TINY["runs"])
    assert report.count('in lockstep" ') == 2 * len(TINY["runs"]), "each in two widths"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": ("1f1b", "zero-bubble")}, "name one or more of the runs one-device, .*, not 1f1b, zero-bubble"),
        ({"schedule": "gpipe"}, "schedules are chosen by runs"),
        ({"pipe": 1}, "pipe is at least 2"),
        ({"layers": 5}, "5 layers do not divide evenly over pipe=2"),
        ({"layers": 6}, "layers do not divide evenly over pipe=2"),
        ({"microbatches": 3}, "microbatches=3: with 2 rounds"),
    ],
)
def test_pipeline_bad_flags_raise_early(text, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        call(pipeline.main, data=(text,), out=tmp_path / "run", **TINY | changes)
    assert not (tmp_path / "run").exists()
