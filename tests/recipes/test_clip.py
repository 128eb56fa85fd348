"""The recipe end to end, on a mesh: digits, report and export; stopped and resumed."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from recipes import clip
from tests.recipes.flags import call
from tests.recipes.optimization import check_optimization
from zoo import train
from zoo.train.digits import load_digits

pytestmark = pytest.mark.ci

TINY = {
    "patch_size": 4, "features": 8, "embed": 16, "layers": 1, "mlp_dim": 16, "held_out": 16, "batch_size": 8,
    "steps": 2, "eval_every": 1, "warmup_steps": 1, "fsdp": 2, "tensor": 2,
}  # fmt: skip


def test_clip_learns_exports_and_reports(tmp_path, capsys):
    call(clip.main, out=tmp_path, **TINY)
    lines = train.read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    accuracy = lines[-1]["accuracy"]
    assert accuracy * 16 == round(accuracy * 16) and lines[-1]["validation"] > 0
    assert "nats after 2 steps on" in capsys.readouterr().out
    report = (tmp_path / "report.html").read_text()
    assert 'aria-label="Digits with words"' in report and f"{accuracy:.1%}" in report and "http" not in report
    check_optimization(tmp_path)

    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert (config["model_type"], config["projection_dim"]) == ("clip", 8)
    _, test = load_digits(held_out=16)
    model = zoo.load(tmp_path / "export")
    nearest = (zoo.embed(model, images=jnp.asarray(test.images)) @ zoo.embed(model, clip.spell()).T).argmax(-1)
    assert np.mean(nearest == test.labels) == pytest.approx(accuracy)


def test_held_out_loss_is_over_batches_of_the_size_of_training():
    rows = {"images": np.arange(8)[:, None], "labels": np.arange(8)}
    parts = clip.cut(rows, 2)
    assert [list(part["labels"]) for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    words = [bytes(row).rstrip(b"\0").decode() for row in np.asarray(clip.spell(), np.uint8)]
    assert words == list(clip.WORDS)
