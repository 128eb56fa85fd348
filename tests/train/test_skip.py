"""Optimizers that skip steps leave parameters and state bit for bit as they were."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zoo import train

PARAMS = {"w": jnp.array([1.5, -0.0, 0.0, -2.0]), "b": jnp.array([0.25], jnp.bfloat16)}


def make_gradients(value=1.0):
    return {"w": jnp.array([1.0, -1.0, 0.5, value]), "b": jnp.array([1.0], jnp.bfloat16)}


def same_bits(first, second):
    equal = lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes() and a.dtype == b.dtype
    return jax.tree.all(jax.tree.map(equal, first, second))


def run(optimizer, gradients, params=PARAMS):
    """Return parameters and state after each of the steps."""

    @jax.jit
    def step(gradients, params, state):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state, history = optimizer.init(params), []
    for gradient in gradients:
        params, state = step(gradient, params, state)
        history.append((params, state))
    return history


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poisoned_step_changes_no_bit(poison):
    adamw = optax.adamw(optax.linear_schedule(0.1, 0.0, 10), weight_decay=0.1)
    good, bad = make_gradients(), make_gradients(poison)
    history = run(train.skip_nonfinite(adamw), [good, bad, bad, good])
    (first, state), (second, skipped), (_, twice), (last, after) = history
    assert same_bits((first, state.inner), (second, skipped.inner))
    assert [int(x.skipped) for x in (state, skipped, twice, after)] == [0, 1, 2, 2]
    assert [int(x.in_a_row) for x in (state, skipped, twice, after)] == [0, 1, 2, 0]
    plain = run(adamw, [good, good])[-1]
    assert same_bits((last, after.inner), plain)  # as if the poisoned steps had never been: schedule, moments, decay
    assert {name: int(x) for name, x in train.count_skips((after, {})).items()} == {
        "skipped_steps": 2,
        "skipped_in_a_row": 0,
    }


def test_negative_zeros_survive_a_skipped_step():
    history = run(train.skip_nonfinite(optax.sgd(0.1)), [make_gradients(np.nan)])
    assert same_bits(history[0][0], PARAMS)  # with the -0.0 of `w`
    assert train.count_skips(optax.sgd(0.1).init(PARAMS)) == {}


class Targets:
    """Batches that are numbers."""

    def __init__(self, values):
        self.values, self.state = values, 0

    def __next__(self):
        self.state += 1
        return self.values[self.state - 1]

    def restore(self, state):
        self.state = state


def test_run_goes_on_after_a_skipped_step(tmp_path):
    """One poisoned batch is survived; four in a row end the run, with the good checkpoint on disk."""
    optimizer = train.skip_nonfinite(optax.sgd(0.5))

    @eqx.filter_jit(donate="all-except-first")
    def step(target, params, state):
        loss, gradients = jax.value_and_grad(lambda params: ((params - target) ** 2).sum())(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def train_on(targets, out):
        with train.Run(out, config={}, fetch_every=1, max_skipped=3) as run:
            params, state = jnp.zeros(2), optimizer.init(jnp.zeros(2))
            for target in run.steps(Targets(targets), len(targets)):
                params, state, loss = step(jnp.full(2, target), params, state)
                run.log(loss=loss, **train.count_skips(state))
                if run.every(2):
                    run.save((params, state))
        return params

    assert train_on([1.0, np.nan, 1.0, 1.0], tmp_path / "one").tolist() == [1, 1]
    assert [x["skipped_steps"] for x in train.read_metrics(tmp_path / "one" / "metrics.jsonl")] == [0, 1, 1, 1]
    with pytest.raises(FloatingPointError, match="4 steps in a row were skipped, up to step 7.*--resume"):
        train_on([1.0, 1.0, 1.0, *[np.nan] * 7], tmp_path / "many")
    like = (jnp.zeros(2), optimizer.init(jnp.zeros(2)))
    with train.Checkpoints(tmp_path / "many" / "checkpoints") as checkpoints:
        _, (params, _), _, _ = checkpoints.restore(like)
    assert params.tolist() == [1, 1] and np.isfinite(params).all()
