"""The recipe as its users run it: mixers at equal parameters, stopped and resumed, on eight devices."""

import json

import pytest

import zoo
from recipes import linear_attention
from tests.recipes.flags import call
from tests.recipes.optimization import check_optimization
from zoo import train

pytestmark = pytest.mark.ci

TINY = {
    "mixers": ("gated-delta-net",), "embed": 16, "layers": 1, "heads": 2, "mlp_dim": 96, "seq_len": 16,
    "batch_size": 8, "steps": 4, "warmup_steps": 1, "eval_every": 2, "remat": "none", "tensor": 2,
}  # fmt: skip


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
        ({"mlp_dim": 8, "mixers": ("rwkv7",)}, "rwkv7 has more parameters without an MLP than attention with one"),
        ({"batch_size": 6}, "6 rows do not divide evenly over data=4"),
    ],
)
def test_linear_attention_bad_flags_raise_early(text, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        call(linear_attention.main, data=(text,), out=tmp_path / "run", **TINY | changes)
    assert not (tmp_path / "run").exists()
