"""The recipe end to end, stopped and resumed."""

import json

import equinox as eqx
import jax
import numpy as np
import pytest

from recipes import recall
from tests.recipes.flags import call
from tests.recipes.optimization import check_optimization
from zoo import train
from zoo.inspect import state_bytes

pytestmark = pytest.mark.ci

TINY = {
    "mixers": ("attention", "delta-net"), "widths": (8,), "vocab": 16, "seq_len": 16, "num_pairs": 3, "batch_size": 4,
    "steps": 3, "rates": (1e-3, 1e-2), "num_seeds": 2, "eval_rows": 4, "eval_every": 1,
}  # fmt: skip


@pytest.mark.parametrize("mixers", [("delta-net",), pytest.param(TINY["mixers"], marks=pytest.mark.slow)], ids="+".join)
def test_recall_runs_and_their_report(mixers, tmp_path):
    out = tmp_path / "run"
    call(recall.main, out=out, **TINY | {"mixers": mixers})
    for mixer in mixers:
        lines = train.read_metrics(out / f"{mixer}-8" / "metrics.jsonl")
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert all(np.shape(line["losses"]) == (4,) and np.shape(line["accuracies"]) == (2, 2) for line in lines)
        # Runs of one seed start alike, whatever their rate; those of two seeds do not.
        first = lines[0]["losses"]
        assert first[0] == pytest.approx(first[2], abs=1e-5) and first[1] == pytest.approx(first[3], abs=1e-5)
        assert abs(first[0] - first[1]) > 1e-3
        assert abs(lines[-1]["losses"][0] - lines[-1]["losses"][2]) > 1e-3
        assert lines[-1]["accuracy"] == pytest.approx(np.mean(lines[-1]["accuracies"], axis=1).max())
        assert json.loads((out / f"{mixer}-8" / "config.json").read_text())["run"] == f"{mixer}-8"
    check_optimization(out, *(f"{mixer}-8" for mixer in mixers))
    report = (out / "report.html").read_text()
    assert "bytes of state per row" in report and ">delta-net</text>" in report and "http" not in report


def test_recall_counts_bytes_of_state():
    """A key and a value for each token, or a matrix; places of tokens, two counts, and windows of convolutions."""

    def size(mixer, length):
        return state_bytes(recall.make_model(mixer, 8, 16, jax.random.key(0)), length)

    window = 2 * 8 * 4
    assert size("attention", 16) == window + 16 * (2 * 8 * 4 + 4) + 2 * 4
    assert size("delta-net", 16) == size("delta-net", 64) == window + 8 * 8 * 4 + 3 * 3 * 8 * 4


WITH_CACHE = ("attention", "forgetting-attention", "differential-attention", "moba", "native-sparse-attention")


@pytest.mark.parametrize("mixer", recall.MIXERS)
def test_recall_mixers_have_a_countable_state(mixer):
    model = eqx.filter_eval_shape(recall.make_model, mixer, 8, 16, jax.random.key(0))
    assert eqx.filter_eval_shape(model.__class__.__call__, model, np.zeros((1, 16), np.int32)).shape == (1, 16, 16)
    assert (state_bytes(model, 16) < state_bytes(model, 64)) == (mixer in WITH_CACHE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixers": ("attention", "memory")}, "name one or more of the mixers attention, .*, not attention, memory"),
        ({"mixers": ()}, "name one or more of the mixers .*, not none"),
        ({"num_pairs": 5}, "5 pairs and as many queries want rows of at least 20 tokens, not 16"),
        ({"num_pairs": 4, "vocab": 8}, "a vocabulary of more than 9, not 8"),
        ({"widths": ()}, r"widths=\(\): expected one or more numbers above 0"),
        ({"widths": (8, 0)}, r"widths=\(8, 0\): expected one or more numbers above 0"),
        ({"rates": (0.0,)}, "a sweep wants learning rates above 0"),
    ],
)
def test_recall_bad_flags_raise_early(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        call(recall.main, out=tmp_path / "run", **TINY | changes)
    assert not (tmp_path / "run").exists()
