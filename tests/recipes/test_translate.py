"""The recipe end to end, on a mesh and with another mixer; stopped and resumed as the others are."""

import pytest

from recipes import translate
from tests.recipes.flags import call
from tests.recipes.optimization import check_optimization
from zoo import train

pytestmark = pytest.mark.ci

TINY = {
    "embed": 16, "layers": 1, "heads": 2, "batch_size": 8, "steps": 2, "eval_every": 1, "warmup_steps": 1,
    "held_out": 8, "fsdp": 2, "tensor": 2, "data_processes": 1,
}  # fmt: skip


def test_translate_trains_and_reports(tmp_path, capsys):
    call(translate.main, out=tmp_path, **TINY)
    lines = train.read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[-1]["validation"] > 0 and lines[-1]["exact_match"] == 0
    assert "nats per trained token after 2 steps on" in capsys.readouterr().out
    report = (tmp_path / "report.html").read_text()
    assert "translated without a fault" in report and "http" not in report
    check_optimization(tmp_path)


def test_records_of_another_kind_are_refused(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "only one"}\n')
    with pytest.raises(ValueError, match="the kind of the records is text, expected one of pair"):
        call(translate.main, out=tmp_path / "run", data=(str(file),), **TINY)
