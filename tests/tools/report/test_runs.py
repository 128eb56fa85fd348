"""Reports on one run, whatever its end, and on several."""

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

import zoo
from zoo import tools, train

SIZES = {"vocab": 256, "embed": 8, "layers": 1, "heads": 2, "mlp": 8}


@pytest.fixture
def corpus(tmp_path):
    return train.load_text({f"{i}": f"{i} bottles of beer on the wall, " * 9 for i in range(40)}, cache=tmp_path / "c")


def finish(out, corpus, *, samples=(), prompts=(), before=None, occupied=None, **options):
    """The end of a run of one step that saved nothing."""
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    with train.Run(out, mesh=mesh, data=corpus) as run:
        run.step = 1
        run.log(bits_per_byte=8.0, validation=8.0)
    if occupied is not None:
        occupied.write_text("a file where a folder would be")
    model = zoo.models.Transformer(**SIZES, **options, key=jax.random.key(0))
    about = {"samples": samples, "prompts": prompts, "before": before, "key": jax.random.key(1), "export_seq_len": 8}
    tools.report_run(run, "A Transformer", model, **about)


def test_report_is_written_if_the_export_fails(tmp_path, corpus):
    out = tmp_path / "run"
    with pytest.raises(ValueError, match="export is a file: expected a directory"):
        finish(out, corpus, occupied=out / "export")
    report = (out / "report.html").read_text()
    assert "layers.*.attention.query.weight" in report and "1 layer of Attention and GatedMLP" in report


def test_report_is_written_if_samples_fail(tmp_path, corpus, monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError("this mixer has no state")

    monkeypatch.setattr("zoo.train.run.continue_prompts", refuse)
    with pytest.raises(NotImplementedError, match="no state"):
        finish(tmp_path / "run", corpus, prompts=["def"])
    assert (tmp_path / "run" / "report.html").exists() and not (tmp_path / "run" / "export").exists()


def test_report_of_a_model_without_a_family_ends_with_a_line(tmp_path, corpus, capsys):
    finish(tmp_path / "run", corpus, soft_cap=30.0, samples=[("def", " f():  \n\n \x1b[2J \n")])
    *_, sample, _, result, report, line = capsys.readouterr().out.splitlines()
    assert sample == " \\x1b[2J" and result.startswith("validation 8.000 bits per byte after 1 steps")
    assert report == f"wrote the report to {tmp_path / 'run' / 'report.html'}"
    assert line.startswith("no family holds this model (llama: ")
    assert line.endswith("); weights are in no checkpoint; see Port a model")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["figures"] == {"validation": "8.000"} and results["metrics"]["bits_per_byte"] == 8
    assert results["samples"] == [["def", " f():  \n\n \x1b[2J \n"]]


@pytest.mark.parametrize("before", [None, {"validation": 9.0}])
def test_samples_before_and_after_are_two_columns(tmp_path, corpus, before):
    samples = [("a", "1"), ("b", "2"), ("a", "3"), ("b", "4")]
    finish(tmp_path / "run", corpus, soft_cap=30.0, samples=samples, before=before)
    report = (tmp_path / "run" / "report.html").read_text()
    assert report.count("<small>before</small>") == report.count("<small>after</small>") == 2 * bool(before)
    assert report.count("<pre>") == 4


def test_stopped_run_reports_nothing(tmp_path):
    with train.Run(train.RunOptions(tmp_path / "run"), config={}) as run:
        run.stopped = True
    tools.report_run(run, "A Transformer", None)
    assert not (tmp_path / "run" / "report.html").exists() and not (tmp_path / "run" / "results.json").exists()


def write_run(directory, validation, speeds):
    directory.mkdir(parents=True)
    metrics = [{"step": 1, "validation": 9.0}, {"step": 3, "validation": 8.0}]
    metrics.append({"step": 5, "validation": validation, "loss": 1.5})
    timing = [{"step": 1, "seconds": 1.0}, *({"step": 2, "seconds": 2.0, "steps_per_second": x} for x in speeds)]
    for name, lines in (("metrics", metrics), ("timing", timing)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@dataclass(frozen=True)
class Config:
    width: int = 8
    depth: int = 2
    run: train.RunOptions = train.RunOptions(Path("runs/a"))


def test_report_sets_values_apart_that_differ_from_the_defaults(tmp_path):
    config = Config(width=16, run=train.RunOptions(tmp_path))
    with train.Run(config.run, config=config) as run:
        run.step = 1
        run.log(validation=8.0)
    tools.report_runs(config, "A run", [{"run": "."}], description="wide")
    report = (tmp_path / "report.html").read_text()
    assert "3 defaults" in report  # depth, seed and track
    tools.report_runs(tmp_path, "A run", [{"run": "."}], description="wide")
    assert "defaults" not in (tmp_path / "report.html").read_text()


def test_report_runs_prints_and_writes_its_table(tmp_path, capsys):
    for name, bits in (("a", 2.5), ("b", 2.0)):
        write_run(tmp_path / name, bits, [4.0])
    rows = [{"run": name, "parameters": 12345, "bits": train.summary(tmp_path / name)["validation"]} for name in "ab"]
    tools.report_runs(tmp_path, "Two runs", rows, description="a and b")
    printed = capsys.readouterr().out.splitlines()
    assert printed[1:4] == ["run  parameters   bits", "  a      12,345  2.500", "  b      12,345  2.000"]
    report = (tmp_path / "report.html").read_text()
    assert "Two runs" in report and "Results" in report and "12,345" in report
    assert "bits per byte against steps" in report and report.count("<svg ") == 2
