"""The recipe as its users run it: mixers at equal parameters, stopped and resumed, on eight devices."""

import json
import os
import signal

import pytest

import zoo
from recipes import linear_attention
from tests.recipes.flags import MESH_FLAGS, RUN_FLAGS, call, flag_names, unexplained_flags
from tests.recipes.optimization import check_optimization
from zoo import train

pytestmark = pytest.mark.ci

TINY = {
    "mixers": ("gated-delta-net",), "embed": 16, "layers": 1, "heads": 2, "mlp_dim": 96, "seq_len": 16,
    "batch_size": 8, "steps": 4, "warmup_steps": 1, "eval_every": 2, "remat": "none", "tensor": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"{number} cats sat on the mat and saw that it was flat " * 10)
    return folder


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "run"
    call(linear_attention.main, data=(text,), out=out, **TINY)
    return out


def test_linear_attention_runs_and_report(unbroken):
    for name in TINY["mixers"]:
        lines = train.read_metrics(unbroken / name / "metrics.jsonl")
        assert [line["step"] for line in lines if "validation" in line] == [2, 4]
        assert lines[-1]["loss"] < lines[0]["loss"]
        assert json.loads((unbroken / name / "config.json").read_text())["run"] == name
    check_optimization(unbroken, *TINY["mixers"])
    report = (unbroken / "report.html").read_text()
    assert "bytes of state after 1,024 tokens" in report and "http" not in report


@pytest.mark.slow
def test_linear_attention_resumes_bitwise(text, unbroken, tmp_path, monkeypatch):
    out, log = tmp_path / "run", train.Run.log

    def struck(run, **values):
        if run.step == 2 and "loss" in values:
            os.kill(os.getpid(), signal.SIGTERM)
        log(run, **values)

    options = {"data": (text,), "out": out} | TINY | {"mixers": ("gated-delta-net",)}
    with monkeypatch.context() as patch:
        patch.setattr(train.Run, "log", struck)
        call(linear_attention.main, **options)
    assert not (out / "report.html").exists()
    call(linear_attention.main, resume=True, **options)
    resumed, expected = (folder / "gated-delta-net" / "metrics.jsonl" for folder in (out, unbroken))
    assert resumed.read_bytes() == expected.read_bytes()


def test_linear_attention_equalizes_parameters(text, tmp_path, monkeypatch):
    """And is laid out on a mesh, before anything is computed."""
    counts = []
    place = zoo.parallel.Mesh.specs

    def specs(mesh, tree, *rest, **options):
        if isinstance(tree, zoo.models.Decoder):
            counts.append(zoo.count(tree))
        return place(mesh, tree, *rest, **options)

    monkeypatch.setattr(zoo.parallel.Mesh, "specs", specs)
    monkeypatch.setattr(zoo, "init", lambda *_: pytest.fail("reached on purpose", pytrace=False))
    options = TINY | {
        "mixers": tuple(linear_attention.mixer_factories(32, 2)),
        "embed": 32,
        "mlp_dim": 256,
        "tensor": 1,
        "layers": 2,
    }
    with pytest.raises(pytest.fail.Exception, match="reached on purpose"):
        call(linear_attention.main, data=(text,), out=tmp_path / "run", **options)
    step_of_widths = 3 * 32 * 2 * 8
    assert len(counts) == len(options["mixers"]) and len(set(counts)) > 1
    assert max(abs(count - counts[0]) for count in counts) <= step_of_widths / 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixers": ("attention", "telepathy")}, "name one or more of the mixers attention, .*, not .*telepathy"),
        ({"mixers": ()}, "name one or more of the mixers attention, .*, not none"),
        ({"steps": 0}, "steps=0 are at least 1"),
        ({"mlp_dim": 8, "mixers": ("rwkv7",)}, "rwkv7 has more parameters without an MLP than attention with one"),
        ({"batch_size": 6}, "6 rows do not divide evenly over data=4"),
    ],
)
def test_linear_attention_bad_flags_raise_early(text, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        call(linear_attention.main, data=(text,), out=tmp_path / "run", **TINY | changes)
    assert not (tmp_path / "run").exists()


FLAGS = [
    *("mixers", "data", "vocab", "embed", "layers", "heads", "mlp_dim", "seq_len", "batch_size", "steps"),
    *("learning_rate", "warmup_steps", "weight_decay", "eval_every"),
    *MESH_FLAGS,
    *RUN_FLAGS,
]


def test_linear_attention_flags_are_explained(capsys):
    assert flag_names(linear_attention.main) == FLAGS
    with pytest.raises(SystemExit):
        train.run_cli(linear_attention.main, linear_attention.Config, arguments=["--help"])
    printed = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')} " in printed for name in FLAGS)
    assert unexplained_flags(linear_attention.main) == []
