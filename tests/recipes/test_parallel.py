"""The recipe as its users run it: one device and a mesh with equal losses, collectives of every axis, resumed."""

import shutil

import pytest

from recipes import parallel
from tests.recipes.flags import call
from tests.recipes.optimization import check_optimization
from zoo import train

pytestmark = pytest.mark.ci

TINY = {
    "embed": 16, "layers": 2, "heads": 4, "mlp_dim": 32, "seq_len": 16, "batch_size": 4, "steps": 3,
    "warmup_steps": 1, "eval_every": 2, "remat": "none",
}  # fmt: skip


def check_losses(out):
    """Check that the mesh has the losses of one device; return its metrics file."""
    serial, sharded = (train.read_metrics(out / name / "metrics.jsonl") for name in ("one-device", "mesh"))
    assert [line["loss"] for line in sharded] == pytest.approx([line["loss"] for line in serial], rel=1e-4)
    return out / "mesh" / "metrics.jsonl"


def test_parallel_equals_one_device_and_lists_collectives(text, tmp_path, capsys):
    out = tmp_path / "run"
    call(parallel.main, data=(text,), out=out, **TINY | {"layers": 1})
    check_losses(out)
    check_optimization(out, "one-device", "mesh")
    printed, report = capsys.readouterr().out, (out / "report.html").read_text()
    assert "fsdp 2 x context 2 x tensor 2: 8 devices" in printed and "collective-permute" in printed
    for words in (
        "largest difference",
        "all-gather",
        "reduce-scatter",
        *map(parallel.REASONS.get, ("fsdp", "context")),
    ):
        assert words in report


@pytest.mark.slow
def test_parallel_resumes_with_attention(text, tmp_path):
    out = tmp_path / "run"
    call(parallel.main, data=(text,), out=out, **TINY)
    lines = check_losses(out).read_bytes()
    shutil.rmtree(out / "mesh" / "checkpoints" / "3")
    call(parallel.main, data=(text,), out=out, resume=True, **TINY)
    assert (out / "mesh" / "metrics.jsonl").read_bytes() == lines


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "a Hybrid has at least 1 layer"),
        ({"heads": 3}, "heads=3 do not divide embed=16"),
        ({"tensor": 3}, "tensor=3 asks for a multiple of 12 devices, there are 8"),
    ],
)
def test_parallel_bad_flags_raise_early(text, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        call(parallel.main, data=(text,), out=tmp_path / "run", **TINY | changes)
    assert not (tmp_path / "run").exists()
