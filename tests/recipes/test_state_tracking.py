"""The recipe end to end, stopped and resumed."""

from functools import partial

import equinox as eqx
import jax
import numpy as np
import pytest

from recipes import state_tracking
from tests.recipes.flags import call
from tests.recipes.optimization import check_optimization
from zoo import train
from zoo.layers import TokenInfo

pytestmark = pytest.mark.ci

TINY = {
    "groups": ("s3",), "mixers": ("attention", "delta-net-negative"), "embed": 8, "seq_len": 4,
    "eval_seq_len": 40, "batch_size": 4, "steps": 3, "rates": (1e-3, 1e-2), "num_seeds": 2, "eval_rows": 4,
    "eval_every": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "mixers", [TINY["mixers"][1:], pytest.param(TINY["mixers"], marks=pytest.mark.slow)], ids="+".join
)
def test_state_tracking_runs_and_their_report(mixers, tmp_path):
    out, names = tmp_path / "run", [f"s3-{mixer}" for mixer in mixers]
    call(state_tracking.main, out=out, **TINY | {"mixers": mixers})
    for name in names:
        lines = train.read_metrics(out / name / "metrics.jsonl")
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert all(np.shape(line["losses"]) == (4,) and np.shape(line["places"]) == (4, 40) for line in lines)
        beyond = np.mean(lines[-1]["places"], axis=1, where=np.arange(40) >= 4)
        assert lines[-1]["beyond"] == pytest.approx(beyond.max())
    check_optimization(out, *names)
    report = (out / "report.html").read_text()
    for part in ("Accuracy by place: s3", "chance 0.167", "up to 4 tokens", "4 to 40", "median run"):
        assert part in report
    assert "http" not in report


@pytest.mark.parametrize("name", state_tracking.MIXERS)
def test_state_tracking_builds_every_mixer(name):
    mixer = eqx.filter_eval_shape(
        partial(state_tracking.mixer_factories(8, 2)[name], 8, out_scale=0.5), key=jax.random.key(0)
    )
    x = jax.numpy.zeros((1, 16, 8))
    mixed, _ = eqx.filter_eval_shape(lambda mixer: mixer(x, TokenInfo(None, None, None)), mixer)
    assert mixed.shape == x.shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixers": ("attention", "memory")}, "name one or more of the mixers attention, .*, not attention, memory"),
        ({"groups": ("s4",)}, "name one or more of the groups parity, s3, a4, s5, not s4"),
        ({"groups": ()}, "name one or more of the groups .*, not none"),
        ({"eval_seq_len": 4}, "eval_seq_len=4 is not more than seq_len="),
        ({"num_seeds": 0}, "a sweep wants learning rates above 0, and seeds"),
        ({"rates": ()}, "a sweep wants learning rates above 0"),
    ],
)
def test_state_tracking_bad_flags_raise_early(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        call(state_tracking.main, out=tmp_path / "run", **TINY | changes)
    assert not (tmp_path / "run").exists()
