"""Numbers that are not finite, found in metrics and states."""

import jax
import jax.numpy as jnp
import pytest

from zoo.train.finite import describe_retry, find_nan_arrays, find_nonfinite_metrics


def test_nonfinite_metrics_are_named_with_their_step():
    fine = {"step": 3, "loss": 1.5, "rows": [1, 2], "none": [], "some": [["nan", 1.0], ["inf", 2.0]], "metric": None}
    assert find_nonfinite_metrics([fine]) is None
    bad = {"step": 4, "loss": "nan", "norm": "inf", "rate": 0.1, "all": [["-inf"], ["nan"]]}
    assert find_nonfinite_metrics([fine, bad, bad | {"step": 5}]) == "loss is nan, norm is inf, all is -inf in step 4"


def test_nan_arrays_of_a_state_are_named():
    state = {"weight": jnp.ones((3, 2)), "scale": jnp.float32(1), "count": 3, "key": jax.random.key(0), "name": "a"}
    state |= {"mask": jnp.array([-jnp.inf, 0]), "empty": jnp.zeros((0, 2))}
    assert find_nan_arrays(state, step=7) is None
    spoiled = state | {"weight": state["weight"].at[1, 1].set(jnp.nan)}
    assert find_nan_arrays((spoiled, 1), step=7) == "NaN in [0].weight of the state after step 7"
    many = {f"w{i}": jnp.full(i, jnp.nan, jnp.bfloat16) for i in range(1, 6)}
    assert find_nan_arrays(many, step=7) == "NaN in w1, w2, w3 and 2 more arrays of the state after step 7"


@pytest.mark.parametrize("spread", [False, True])
def test_nan_in_a_sweep_counts_once_every_run_has_one(spread):
    """The first two runs diverge; the third, if `spread`."""
    models = {"weight": jnp.ones((3, 4)).at[0].set(jnp.nan), "bias": jnp.zeros(3).at[1].set(jnp.nan)}
    models["bias"] = models["bias"].at[2].set(jnp.nan if spread else 0)
    assert (find_nan_arrays(models, step=1) is not None) == spread


def test_retry_names_the_checkpoints():
    assert describe_retry([]).endswith("saved nothing: start again with another learning rate")
    assert describe_retry([20]).endswith("after step 20: with another learning rate, go on from there by --resume")
    assert describe_retry([10, 15, 20]).endswith("by --resume, or from 10 or 15 by --resume STEP")
