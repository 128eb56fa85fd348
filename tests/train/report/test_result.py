"""The end of a run: the report comes first, and only a model without a family is excused from the export."""

import jax
import pytest

import zoo
from zoo import train

SIZES = {"vocab": 256, "embed": 8, "layers": 1, "heads": 2, "mlp": 8}


@pytest.fixture
def corpus(tmp_path):
    return train.load_text({f"{i}": f"{i} bottles of beer on the wall, " * 9 for i in range(40)}, cache=tmp_path / "c")


def finish(out, corpus, *, samples=(), prompts=(), occupied=None, **options):
    """The end of a run of one step that saved nothing."""
    with train.Run(train.RunOptions(out), config={}) as run:
        run.step = 1
        run.log(bits_per_byte=8.0, validation=8.0)
    if occupied is not None:
        occupied.write_text("a file where a folder would be")
    model = zoo.models.Transformer(**SIZES, **options, key=jax.random.key(0))
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    run.report(
        "A Transformer", model, mesh, corpus, samples=samples, prompts=prompts, key=jax.random.key(1), export_seq_len=8
    )


def test_report_is_written_before_an_export_that_fails(tmp_path, corpus):
    out = tmp_path / "run"
    with pytest.raises(OSError, match="export"):
        finish(out, corpus, occupied=out / "export")
    assert "layers.*.attention.query.weight" in (out / "report.html").read_text()


def test_report_is_written_before_samples_that_fail(tmp_path, corpus, monkeypatch):
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
