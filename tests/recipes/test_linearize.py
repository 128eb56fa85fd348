"""The recipe end to end: a trained teacher and a loaded one, stopped and resumed, on eight devices."""

import json

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


def test_linearize_runs_and_report(unbroken):
    lines = {name: train.read_metrics(unbroken / name / "metrics.jsonl") for name in ("teacher", "match", "replaced-1")}
    assert [line["step"] for line in lines["replaced-1"] if "validation" in line] == [2, 4]
    assert lines["match"][-1]["loss"] < lines["match"][0]["loss"]
    assert np.shape(lines["match"][-1]["unexplained"]) == (2,)
    assert lines["replaced-1"][-1]["divergence"] < lines["replaced-1"][1]["divergence"]
    assert all(line["gradient_norm"] > 0 for name in lines for line in lines[name])
    report = json.loads((unbroken / "report.json").read_text())
    results = report["tables"]["Results"]
    assert [row["run"] for row in results] == ["teacher", "replaced-1"] and results[0]["layers"] == "none"
    teacher, hybrid = (row["bytes of state after 8,192 tokens"] for row in results)
    assert hybrid < 0.6 * teacher
    ranks = report["tables"]["Each layer replaced alone, after matching"]
    assert {row["layer"] for row in ranks} == {1, 3} and ranks[0]["divergence"] <= ranks[1]["divergence"]
    assert results[1]["layers"] == str(ranks[0]["layer"])
    assert results[1]["bits per byte, matched"] == pytest.approx(ranks[0]["validation"], rel=1e-5)
    assert "layers replaced" in (unbroken / "report.html").read_text()


@pytest.mark.slow
def test_linearize_loads_a_teacher_and_only_copies(text, start, tmp_path):
    """With samples, in a given order, and without matching."""
    options = TINY | {"match_steps": 0, "order": (1, 0), "steps": 2, "recurrence": "recurrent"}
    call(linearize.main, teacher=start, data=(text,), out=tmp_path / "run", **options)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [row["layers"] for row in report["tables"]["Results"]] == ["none", "1", "0, 1"]
    assert [prompt for prompt, _ in report["samples"]] == [*linearize.PROMPTS, *linearize.PROMPTS]
    assert not (tmp_path / "run" / "teacher").exists() and not (tmp_path / "run" / "match").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recall_share": 1.0}, "recall_share=1.0: a share of the rows between 0 and 1"),
        ({"match_steps": -1}, "match_steps 0 or more"),
        ({"num_pairs": 5}, "5 pairs and as many queries want rows of at least 20 tokens, not 16"),
        ({"recall_vocab": 512}, "recall_vocab=512 is more than the 256 tokens of the text"),
        ({"order": (0, 0)}, r"order=\(0, 0\): some of the layers \[1, 3\], each once"),
        ({"replace": (3,)}, r"replace=\(3,\): numbers of layers from 1 to 2"),
    ],
)
def test_linearize_bad_flags_raise_early(text, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        call(linearize.main, data=(text,), out=tmp_path / "run", **TINY | changes)
    assert not (tmp_path / "run").exists()
