"""The recipe end to end, stopped and resumed, and a run of its sweep against the same run without one."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import zoo
from recipes import optimizers
from tests.recipes.flags import call
from tests.recipes.optimization import check_optimization
from zoo import train

pytestmark = pytest.mark.ci

TINY = {
    "optimizers": ("adamw", "schedule_free"), "embed": 8, "layers": 1, "mlp_dim": 8, "seq_len": 16, "batch_size": 4,
    "steps": 4, "warmup_steps": 1, "rates": (1e-3, 1e-2), "num_seeds": 2, "eval_rows": 4, "eval_every": 2,
    "timed_steps": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    """Runs of AdamW and of schedule-free AdamW."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    call(optimizers.main, out=out, data=(text,), **TINY)
    return out


def test_optimizers_runs_and_their_report(unbroken):
    runs = {name: train.read_metrics(unbroken / name / "metrics.jsonl") for name in TINY["optimizers"]}
    for lines in runs.values():
        assert [line["step"] for line in lines] == [1, 2, 3, 4]
        assert all(np.shape(line["losses"]) == (4,) for line in lines)
        # Runs of one seed start alike, whatever their rate; those of two seeds do not.
        first = lines[0]["losses"]
        assert first[0] == pytest.approx(first[2], abs=1e-5) and first[1] == pytest.approx(first[3], abs=1e-5)
        assert abs(first[0] - first[1]) > 1e-3
        assert abs(lines[-1]["losses"][0] - lines[-1]["losses"][2]) > 1e-3
        assert np.shape(lines[-1]["held_out"]) == (2, 2)
        assert lines[-1]["validation"] == pytest.approx(np.mean(lines[-1]["held_out"], axis=1).min())
    assert runs["adamw"][0]["losses"] == pytest.approx(runs["schedule_free"][0]["losses"], abs=1e-5)
    check_optimization(unbroken, "adamw")
    stable = [max(line["learning_rate"]) for line in runs["schedule_free"]]
    assert stable == pytest.approx([0.0, 1e-2, 1e-2, 1e-2])
    report = (unbroken / "report.html").read_text()
    for part in ("bytes of state per parameter", "spread of seeds", "time per step, adamw = 1", "peak learning rate"):
        assert part in report
    assert "http" not in report


def test_optimizers_run_of_a_sweep_equals_a_run_of_its_own(unbroken, text):
    """The rate of a sweep is traced in the optimizer: its average x depends on the rate by more than a factor."""
    lines = train.read_metrics(unbroken / "schedule_free" / "metrics.jsonl")
    corpus = train.load_text((text,))
    model = zoo.models.Transformer(vocab=256, embed=8, layers=1, heads=2, mlp=8, qk_norm=True, key=jax.random.key(1))
    schedule = optax.join_schedules([optax.constant_schedule(0.0), optax.constant_schedule(1e-2)], [1])
    named = train.make_optimizer("schedule_free", schedule, weight_decay=0.1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), named)
    opt_state = optimizer.init(zoo.trainable(model))

    @eqx.filter_jit
    def compute_loss(model, batch):
        total, count = zoo.cross_entropy(model, batch)
        return total / count

    batches = corpus.train.batches(16, 4, seed=0)
    for line in lines:
        loss, grads = eqx.filter_value_and_grad(compute_loss)(model, next(batches))
        assert line["losses"][3] == pytest.approx(float(loss), abs=1e-5)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = eqx.apply_updates(model, updates)
    batches.close()
    (held_out,) = corpus.validation.ordered(16, 4, limit=1)
    at_x, at_y = (compute_loss(each, held_out) / np.log(2) for each in (train.eval_params(opt_state, model), model))
    assert lines[-1]["held_out"][1][1] == pytest.approx(float(at_x), abs=1e-5)
    assert abs(at_x - at_y) > 1e-4


BYTES = {"adamw": 8, "lion": 4, "schedule_free": 8, "ademamix": 12, "adopt": 8, "prodigy": 16}
"""Bytes of state per parameter."""


@pytest.mark.slow
@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_optimizers_trains_with_each(name, text, tmp_path, capsys):
    call(optimizers.main, out=tmp_path / "run", data=(text,), **TINY | {"optimizers": (name,)})
    lines = train.read_metrics(tmp_path / "run" / name / "metrics.jsonl")
    assert lines[-1]["losses"][3] < lines[0]["losses"][3]
    (row,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] == [name])
    matrices = 4 * 8 * 8 + 3 * 8 * 8
    tables = 256 * 8 + 3 * 8 + 2 * 4  # with three norms of the stream, and one each of queries and keys
    expected = BYTES | {"muon": (4 * matrices + 8 * tables) / (matrices + tables)}
    assert float(row[-2]) == pytest.approx(expected[name], abs=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizers": ("adamw", "sgd")}, "name one or more of the optimizers adamw, .*, not adamw, sgd"),
        ({"optimizers": ()}, "name one or more of the optimizers .*, not none"),
        ({"num_seeds": 0}, "a sweep wants learning rates above 0, and seeds"),
        ({"rates": ()}, "a sweep wants learning rates above 0"),
    ],
)
def test_optimizers_bad_flags_raise_early(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        call(optimizers.main, out=tmp_path / "run", **TINY | changes)
    assert not (tmp_path / "run").exists()
