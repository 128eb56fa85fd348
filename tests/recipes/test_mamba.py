"""The recipe as its users run it: both generations, stopped and resumed, on eight devices; and what it exports."""

import jax.numpy as jnp
import pytest

import zoo
from recipes import mamba
from tests.recipes.flags import call
from tests.recipes.optimization import check_optimization

pytestmark = pytest.mark.ci

TINY = {
    "embed": 16, "layers": 1, "state_dim": 4, "head_dim": 8, "seq_len": 16, "batch_size": 8, "steps": 4,
    "warmup_steps": 1, "eval_every": 2, "remat": "none", "tensor": 2,
}  # fmt: skip


def test_mamba_exports_and_reports(text, tmp_path, without_samples):
    call(mamba.main, data=(text,), out=tmp_path / "run", **TINY)
    check_optimization(tmp_path / "run")
    assert "bytes of decoding state" in (tmp_path / "run" / "report.html").read_text()
    model = zoo.load(tmp_path / "run" / "export")
    assert type(model.stack.segments[0].blocks[0].mixer).__name__ == "Mamba2"
    assert jnp.isfinite(model(jnp.zeros((1, 5), int))).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 7}, "does not divide evenly over heads 7 wide"),
        ({"batch_size": 6}, "6 rows do not divide evenly over data=4"),
    ],
)
def test_mamba_bad_flags_raise_early(text, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        call(mamba.main, data=(text,), out=tmp_path / "run", **TINY | changes)
    assert not (tmp_path / "run").exists()
