"""The recipe end to end, on a mesh: masked text, report and export; stopped and resumed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from recipes import bert
from tests.recipes.flags import call
from tests.recipes.optimization import check_optimization
from zoo import train

pytestmark = pytest.mark.ci

TINY = {
    "embed": 16, "layers": 2, "heads": 2, "mlp_dim": 16, "seq_len": 16, "held_out": 8, "batch_size": 8, "steps": 2,
    "eval_every": 1, "warmup_steps": 1, "fsdp": 2, "tensor": 2,
}  # fmt: skip


def test_bert_learns_exports_and_reports(text, tmp_path, capsys):
    call(bert.main, data=(text,), out=tmp_path, **TINY)
    lines = train.read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2] and lines[-1]["validation"] > 0
    assert "nats per masked token after 2 steps on" in capsys.readouterr().out
    report = (tmp_path / "report.html").read_text()
    assert (
        "█" in report and "masked tokens right" in report and "nats per masked token" in report and "http" not in report
    )
    check_optimization(tmp_path)

    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert (config["model_type"], config["mask_token_id"], config["max_position_embeddings"]) == ("modernbert", 0, 16)
    (rows,) = train.load_text((text,)).validation.ordered(16, 8, limit=1)
    key = jax.random.split(jax.random.key(0), 3)[2]
    test = bert.mask_tokens(jnp.asarray(rows["tokens"]), key, 0, 256)
    total, count = zoo.cross_entropy(zoo.load(tmp_path / "export"), test)
    assert total / count == pytest.approx(lines[-1]["validation"], rel=1e-5)


def test_bert_masks_in_the_published_proportions():
    tokens = jnp.full((100, 400), 7).at[:, 0].set(0)
    batch = bert.mask_tokens(tokens, jax.random.key(0), 0, 256)
    tokens, masked, targets = map(np.asarray, (tokens, batch["tokens"], batch["targets"]))
    is_target = targets >= 0
    assert is_target.mean() == pytest.approx(0.15, abs=0.01) and not is_target[:, 0].any()
    assert (targets[is_target] == 7).all() and (masked == tokens)[~is_target].all()
    chosen = masked[is_target]
    assert (chosen == 0).mean() == pytest.approx(0.8, abs=0.02)
    assert (chosen == 7).mean() == pytest.approx(0.1, abs=0.02)
