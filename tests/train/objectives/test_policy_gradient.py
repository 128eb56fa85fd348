"""Policy gradients have TRL's values and gradients, on any mesh and in micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import zoo
from tests.train.objectives.trl import (
    FOLDER,
    TOLERANCE,
    find_errors,
    make_rows,
    needs_parity,
    on_each_mesh,
    read_arrays,
    read_values,
)
from zoo.parallel import Module, reduce
from zoo.train import objectives

CHUNK = 32
LOSSES = (
    "grpo grpo_on_policy dr_grpo dapo bnpo gspo cispo grpo_temperature grpo_two_sided rloo"  # all in the folder
).split()


class Samples(Module):
    """What belongs to the targets of samples."""

    group: Float[Array, "batch seq"]
    mean: Float[Array, "batch seq"]
    others: Float[Array, "batch seq"]
    old: Float[Array, "batch seq"]
    reference: Float[Array, "batch seq"]


def make_samples():
    """Rows of the sixteen samples, and what belongs to their targets."""
    stored = read_arrays("grpo/")
    prompts, completions = (
        {name: stored[f"{part}_{name}"] for name in ("ids", "mask")} for part in ("prompt", "completion")
    )
    ids = np.concatenate([prompts["ids"], completions["ids"]], axis=1)
    mask = np.concatenate([prompts["mask"], completions["mask"]], axis=1)
    trained = np.concatenate([np.zeros_like(prompts["mask"]), completions["mask"]], axis=1)
    rows = make_rows(ids, mask, trained, 24)

    def spread(values):
        """Put numbers of the completions' tokens, or of rows, at their targets."""
        values = np.broadcast_to(values, completions["mask"].shape)
        at_targets = np.zeros(rows["weights"].shape, np.float32)
        at_targets[rows["weights"] > 0] = values[completions["mask"] > 0]
        return jnp.asarray(at_targets)

    names = ("advantages_group", "advantages_mean", "advantages_leave_one_out")
    advantages = [spread(stored[name][:, None]) for name in names]
    samples = Samples(*advantages, spread(stored["old_log_probs"]), spread(stored["reference_log_probs"]))
    return rows, samples, completions["mask"].shape[1]


def compute_losses(model, batch, samples):
    """Every loss, from one forward at each temperature."""
    weights = batch["weights"]
    log_p = zoo.log_probs(model, batch, chunk=CHUNK)
    tempered = zoo.log_probs(model, batch, temperature=0.7, chunk=CHUNK)
    log_ratio = log_p - samples.old
    ratio = jnp.exp(log_ratio)
    on_policy = log_p - jax.lax.stop_gradient(log_p)
    divergence = objectives.kl_estimate(log_p, samples.reference)
    clipped = objectives.policy_loss(log_ratio, samples.group)
    high = objectives.policy_loss(log_ratio, samples.group, clip=(0.2, 0.28))
    means = objectives.sequence_log_ratio(log_ratio, weights)
    sums = objectives.sequence_log_ratio(log_ratio, weights, normalized=False)
    two_sided = -jnp.minimum(jnp.minimum(ratio, 1.1) * samples.group, jnp.clip(ratio, 0.8, 1.2) * samples.group)
    per_row = {
        "grpo": clipped + 0.04 * ratio * divergence,
        "grpo_on_policy": objectives.policy_loss(on_policy, samples.group) + 0.04 * jnp.exp(on_policy) * divergence,
        "gspo": objectives.policy_loss(means, samples.group, clip=(0.03, 0.04)),
        "grpo_temperature": objectives.policy_loss(tempered - samples.old, samples.group),
        "grpo_two_sided": two_sided,
        "rloo": objectives.policy_loss(sums, samples.others),
    }
    per_token = {
        "dapo": high,
        "bnpo": clipped,
        "cispo": objectives.cispo_loss(log_ratio, log_p, samples.group, largest=1.2),
    }
    dr_grpo = objectives.policy_loss(log_ratio, samples.mean)
    return {
        **{name: objectives.per_row(losses, weights) for name, losses in per_row.items()},
        **{name: objectives.per_token(losses, weights) for name, losses in per_token.items()},
        "dr_grpo": objectives.per_length(dr_grpo, weights, 12),
    }


@needs_parity
@on_each_mesh
def test_losses_are_those_of_trl(mesh_name):
    values = read_values()
    rows, samples, length = make_samples()
    assert length == 12
    policy = zoo.load(FOLDER / "policy", dtype="float32")
    errors = find_errors(compute_losses, {name: values[name] for name in LOSSES}, policy, rows, mesh_name, samples)
    assert max(errors.values()) < TOLERANCE, errors


@needs_parity
def test_advantages_are_those_of_trl():
    stored = read_arrays("grpo/")
    kinds = {
        "group": {},
        "mean": {"scale": "none"},
        "batch": {"scale": "batch"},
        "leave_one_out": {"baseline": "others", "scale": "none"},
    }
    for name, options in kinds.items():
        found = objectives.group_advantages(stored["rewards"], **options).reshape(-1)
        np.testing.assert_allclose(found, stored[f"advantages_{name}"], rtol=1e-5, atol=1e-6, err_msg=name)


def test_advantages_of_equal_rewards_are_zero():
    rewards = np.array([[0.1, 0.1, 0.1], [1.0, 0.0, 0.0]])
    for options in ({}, {"scale": "none"}, {"baseline": "others", "scale": "none"}):
        assert np.abs(objectives.group_advantages(rewards, **options)[0]).max() < 1e-12


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        (np.zeros((2, 1)), {}, "2 or more samples, got"),
        (np.zeros(4), {}, r"got shape \(4,\)"),
        (np.array([[0.0, np.nan]]), {}, "reward of sample 1 of prompt 0 is nan"),
        (np.zeros((2, 2)), {"baseline": "value"}, "baseline='value'"),
        (np.zeros((2, 2)), {"scale": "std"}, "scale='std'"),
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_rewards_without_advantages_are_refused(rewards, options, message):
    with pytest.raises(ValueError, match=message):
        objectives.group_advantages(rewards, **options)


def make_tokens(seed=0):
    rng = np.random.default_rng(seed)
    log_ratio, advantages = (jnp.asarray(rng.normal(size=(3, 5)), jnp.float32) for _ in range(2))
    weights = jnp.asarray([[0, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], jnp.float32)
    return log_ratio, advantages, weights


def test_averages_leave_out_what_is_not_sampled():
    losses, _, weights = make_tokens()
    first, second = losses[0, 1:3], losses[1]
    expected = {
        "token": np.concatenate([first, second]).mean(),
        "row": (first.mean() + second.mean()) / 2,
        "length": (first.sum() + second.sum()) / (2 * 8),
    }
    found = {
        "token": objectives.per_token(losses, weights),
        "row": objectives.per_row(losses, weights),
        "length": objectives.per_length(losses, weights, 8),
    }
    for name, (total, count) in found.items():
        assert total / count == pytest.approx(float(expected[name]), rel=1e-6), name


def test_averages_of_a_sharded_sequence():
    """A completion has tokens on two devices."""
    losses, _, weights = (jnp.pad(x, ((0, 0), (0, 1))) for x in make_tokens())

    def run(losses, weights):
        ratios = [objectives.sequence_log_ratio(losses, weights, normalized=choice) for choice in (True, False)]
        averages = objectives.per_row(losses, weights), objectives.per_length(losses, weights, 8)
        return [x[:, 0] for x in ratios], [reduce(x, over="seq") for average in averages for x in average]

    mesh = zoo.make_mesh(data=1, context=2, devices=jax.devices()[:2])
    found_ratios, found = zoo.spmd(run, mesh, out=(["batch"] * 2, [""] * 4))(losses, weights)
    ratios, expected = run(losses, weights)
    np.testing.assert_allclose(found_ratios, ratios, rtol=1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_clipped_ratio_has_no_gradient():
    _, gradient = jax.value_and_grad(lambda x: objectives.policy_loss(x, jnp.ones((1, 3))).sum())(
        jnp.log(jnp.array([[0.5, 1.1, 1.5]]))
    )
    assert gradient[0, 2] == 0 and gradient[0, 0] == pytest.approx(-0.5) and gradient[0, 1] == pytest.approx(-1.1)


def test_truncated_ratios_are_weights():
    policy = jnp.log(jnp.array([[0.5, 0.9]]))
    sampler = jnp.log(jnp.array([[0.4, 0.1]]))
    np.testing.assert_allclose(objectives.truncate_ratio(policy, sampler), [[1.25, 2.0]], rtol=1e-6)
    gradient = jax.grad(lambda x: objectives.truncate_ratio(x, sampler).sum())(policy)
    assert (gradient == 0).all()


def test_the_estimated_divergence_is_never_negative():
    log_probs, reference, _ = make_tokens()
    estimate = objectives.kl_estimate(log_probs, reference)
    assert (estimate >= 0).all()
    ratio = np.exp(np.asarray(reference - log_probs, np.float64))
    np.testing.assert_allclose(estimate, ratio - np.log(ratio) - 1, rtol=1e-5, atol=1e-6)
    assert (objectives.kl_estimate(log_probs, log_probs) == 0).all()
