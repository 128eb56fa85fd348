"""The recipe end to end, with its sequence sharded over eight devices."""

import pytest

from recipes import long_context
from tests.recipes.flags import call
from tests.recipes.optimization import check_optimization
from zoo import train

pytestmark = pytest.mark.ci

TINY = {
    "pattern": ("rg-lru", "attention"), "num_layers": 2, "vocab": 16, "embed": 8, "heads": 1, "seq_len": 64,
    "eval_seq_lens": (32, 64), "min_seq_len": 32, "num_pairs": 2, "num_queries": 4, "batch_size": 2, "steps": 2,
    "eval_rows": 16, "eval_every": 2, "context": 8,
}  # fmt: skip


def test_long_context_trains_and_counts_bytes(tmp_path, capsys):
    out = tmp_path / "run"
    call(long_context.main, out=out, **TINY)
    lines = train.read_metrics(out / "hybrid" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2] and len(lines[1]["accuracy"]) == 2
    check_optimization(out, "hybrid")
    assert "Retrieval by depth" in (out / "report.html").read_text()
    *_, short, long = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("hybrid  "))
    assert (short[1], long[1]) == ("32", "64") and float(short[2]) == pytest.approx(lines[1]["accuracy"][0], abs=1e-3)
    recurrence, attention = ([int(row[column].replace(",", "")) for row in (short, long)] for column in (-2, -1))
    assert recurrence[0] == recurrence[1] > 0 and attention[1] > 1.5 * attention[0] > 0  # tokens travel in the latter


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": ("attention", "memory")}, "name one or more of the mixers attention, .*, not attention, memory"),
        ({"seq_len": 48}, "rows hold 32 tokens times a power of two, not 48"),
        ({"context": 3}, "--context 3 takes a multiple of 3 devices"),
    ],
)
def test_long_context_bad_flags_raise_early(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        call(long_context.main, out=tmp_path / "run", **TINY | changes)
    assert not (tmp_path / "run").exists()
