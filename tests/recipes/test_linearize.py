"""The recipe end to end: a trained teacher and a loaded one, stopped and resumed, on eight devices."""

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from recipes import linearize
from tests.recipes.flags import call
from zoo import train

pytestmark = pytest.mark.ci

TINY = {
    "layers": 2, "embed": 16, "heads": 2, "seq_len": 16, "num_pairs": 3, "recall_vocab": 16, "batch_size": 8,
    "teacher_steps": 2, "match_steps": 4, "steps": 4, "eval_every": 2, "eval_batches": 1, "warmup_steps": 1,
    "fsdp": 2, "tensor": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    """A run in which one of two layers is replaced by Mamba-2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zoo.train.samples.generate", repeat_letter)
        out = tmp_path_factory.mktemp("unbroken") / "run"
        call(linearize.main, mixer="mamba2", data=(text,), replace=(1,), out=out, **TINY)
    return out


def repeat_letter(model, tokens, *, max_new_tokens, **options):
    return np.full((len(tokens), max_new_tokens), ord("a"))


def read_table(page, title):
    """Return the rows of a table of a report, each by the heads of its columns."""
    root = ET.fromstring(page.removeprefix("<!DOCTYPE html>"))
    section = next(x for x in root.iter("section") if x.findtext("h2") == title)
    head, *rows = [[cell.text or "" for cell in row] for row in section.iter("tr")]
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_linearize_runs_and_report(unbroken):
    lines = {name: train.read_metrics(unbroken / name / "metrics.jsonl") for name in ("teacher", "match", "replaced-1")}
    assert [line["step"] for line in lines["replaced-1"] if "validation" in line] == [2, 4]
    assert lines["match"][-1]["loss"] < lines["match"][0]["loss"]
    assert np.shape(lines["match"][-1]["unexplained"]) == (2,)
    assert lines["replaced-1"][-1]["divergence"] < lines["replaced-1"][1]["divergence"]
    assert all(line["gradient_norm"] > 0 for name in lines for line in lines[name])
    report = (unbroken / "report.html").read_text()
    results = read_table(report, "Results")
    assert [row["run"] for row in results] == ["teacher", "replaced-1"] and results[0]["layers"] == "none"
    teacher, hybrid = (int(row["bytes of state after 8,192 tokens"].replace(",", "")) for row in results)
    assert hybrid < 0.6 * teacher
    ranks = read_table(report, "Each layer replaced alone, after matching")
    assert {row["layer"] for row in ranks} == {"1", "3"}
    assert float(ranks[0]["divergence"]) <= float(ranks[1]["divergence"])
    assert results[1]["layers"] == ranks[0]["layer"]
    assert results[1]["bits per byte, matched"] == ranks[0]["validation"]
    assert "layers replaced" in report


@pytest.mark.slow
def test_linearize_loads_a_teacher_and_only_copies(text, start, tmp_path):
    """With samples, in a given order, and without matching."""
    options = TINY | {"match_steps": 0, "order": (1, 0), "steps": 2, "recurrence": "recurrent"}
    call(linearize.main, teacher=start, data=(text,), out=tmp_path / "run", **options)
    report = (tmp_path / "run" / "report.html").read_text()
    assert [row["layers"] for row in read_table(report, "Results")] == ["none", "1", "0, 1"]
    assert report.count(f"<pre><b>{linearize.PROMPTS[0]}</b>") == 2
    assert not (tmp_path / "run" / "teacher").exists() and not (tmp_path / "run" / "match").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recall_share": 1.0}, "recall_share=1.0: expected a share of the rows between 0 and 1"),
        ({"match_steps": -1}, "match_steps 0 or more"),
        ({"num_pairs": 5}, "5 pairs and as many queries want rows of at least 20 tokens, not 16"),
        ({"recall_vocab": 512}, "recall_vocab=512 is more than the 256 tokens of the text"),
        ({"order": (0, 0)}, r"order=\(0, 0\): expected some of the layers \[1, 3\], each once"),
        ({"replace": (3,)}, r"replace=\(3,\): expected numbers of layers from 1 to 2"),
    ],
)
def test_linearize_bad_flags_raise_early(text, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        call(linearize.main, data=(text,), out=tmp_path / "run", **TINY | changes)
    assert not (tmp_path / "run").exists()
