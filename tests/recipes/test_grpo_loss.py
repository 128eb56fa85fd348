"""The loss of recipes/grpo.py and the losses of docs/reinforcement.md that replace it: a ratio that is exactly 1, no
signal from equal rewards, and TRL's numbers.

The environment variable ZOO_PARITY names a folder with the losses of TRL's GRPOTrainer and RLOOTrainer.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from safetensors.numpy import load_file

import zoo
from recipes import grpo
from scripts.page_code import list_code
from tests.processes import ROOT
from zoo import train
from zoo.train.reinforcement.grouped_samples import Samples

PARITY = Path(os.environ.get("ZOO_PARITY", "")) / "posttraining"
LOSSES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo")
NEW_TOKENS = 8
ONE_DEVICE = zoo.make_mesh(devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def page():
    """What the page defines, by name."""
    names = {"jax": jax, "objectives": train.objectives}
    code = [source for _, source in list_code((ROOT / "docs" / "reinforcement.md").read_text())]
    exec(next(source for source in code if "def dr_grpo(" in source), names)
    return names


@pytest.fixture(scope="module")
def problem():
    """A model and samples of it, in bfloat16, four of each of three prompts."""
    sizes = {"vocab": 64, "embed": 32, "layers": 2, "heads": 4, "mlp": 64}
    model = zoo.init(lambda key: zoo.models.Transformer(**sizes, key=key), jax.random.key(0), ONE_DEVICE)
    rng = np.random.default_rng(0)
    prompts = {"tokens": rng.integers(1, 64, (3, 5)), "mask": np.ones((3, 5), bool)}
    copy = train.make_sampler(model, ONE_DEVICE, "bfloat16")
    options = {"samples": 4, "max_new_tokens": 8, "mesh": ONE_DEVICE, "stop_tokens": (3, 4, 5, 6, 7)}
    return model, prompts, train.sample_groups(copy, prompts, key=jax.random.key(1), **options)


def compute(problem, page, rewards, loss, dtype="bfloat16", reinforce=False):
    """Return loss and gradient of an update as the page computes it, or as a plain policy gradient."""
    model, prompts, samples = problem
    advantages = train.objectives.group_advantages(rewards, **page["ADVANTAGES"].get(loss, {}))
    packed = train.pack_rollouts(prompts, samples, advantages, 12)
    options = {"max_new_tokens": NEW_TOKENS} if loss == "dr_grpo" else {}

    def loss_fn(model, batch, rollouts):
        log_probs = zoo.log_probs(zoo.cast(model, dtype), batch)
        weights = batch["weights"]
        if reinforce:
            average = {"dapo": "per_token", "cispo": "per_token"}.get(loss, "per_row")
            losses = -rollouts.advantages * log_probs
            if loss in ("gspo", "rloo"):  # every token has the gradient of its row's ratio
                count = 1 if loss == "rloo" else weights.sum(1, keepdims=True)
                rows = -rollouts.advantages.max(1, keepdims=True, where=weights > 0, initial=-jnp.inf)
                losses = rows * (log_probs * weights).sum(1, keepdims=True) / count
                return losses.sum(), jnp.float32(len(losses))
            if loss == "dr_grpo":
                return train.objectives.per_length(losses, weights, NEW_TOKENS)
            return getattr(train.objectives, average)(losses, weights)
        old = lax.stop_gradient(log_probs)
        if loss == "recipe":
            return grpo.compute_loss(log_probs, old, replace(rollouts, sampler=old), weights)[0]
        return page[loss](log_probs, old, rollouts.advantages, weights, **options)

    gradient = zoo.value_and_grad(loss_fn, ONE_DEVICE)
    return jax.device_get(eqx.filter_jit(gradient)(model, *zoo.place_batch(packed, ONE_DEVICE)))


@pytest.mark.parametrize(
    "loss",
    [
        "recipe",
        *(pytest.param(loss, marks=pytest.mark.ci if loss == "gspo" else pytest.mark.slow) for loss in LOSSES),
    ],
)
def test_first_update_is_the_plain_gradient_in_bfloat16(problem, page, loss):
    """The ratio is exactly 1: the gradient is that of -A log p."""
    rewards = np.random.default_rng(1).normal(size=(3, 4))
    value, found = compute(problem, page, rewards, loss)
    _, expected = compute(problem, page, rewards, loss, reinforce=True)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6 * np.abs(y).max())
    assert max(np.abs(x).max() for x in jax.tree.leaves(expected)) > 1e-3
    if loss in ("recipe", "grpo", "gspo", "rloo"):  # the mean of advantages, with a ratio of exactly 1
        assert abs(value) < 1e-6


@pytest.mark.parametrize("loss", ["recipe", pytest.param("rloo", marks=pytest.mark.ci)])
def test_equal_rewards_have_a_gradient_of_zero(problem, page, loss):
    value, found = compute(problem, page, np.repeat([[0.3], [0.0], [-7.1]], 4, axis=1), loss)
    assert value == 0 and not any(x.any() for x in jax.tree.leaves(found))


@pytest.mark.skipif(not PARITY.exists(), reason="ZOO_PARITY names no folder")
@pytest.mark.parametrize(
    ("name", "loss", "options", "advantages"),
    [
        ("grpo", "grpo", {"beta": 0.04}, "group"),
        ("grpo_on_policy", "grpo", {"beta": 0.04}, "group"),
        ("grpo_temperature", "grpo", {"temperature": 0.7}, "group"),
        ("dr_grpo", "dr_grpo", {"max_new_tokens": 12}, "mean"),
        ("dapo", "dapo", {}, "group"),
        ("gspo", "gspo", {"clip": (0.03, 0.04)}, "group"),
        ("cispo", "cispo", {"largest": 1.2}, "group"),
        ("rloo", "rloo", {}, "leave_one_out"),
    ],
)
def test_losses_are_those_of_trl(page, name, loss, options, advantages):
    options = dict(options)
    beta, temperature = options.pop("beta", 0), options.pop("temperature", 1.0)
    stored = load_file(PARITY / "batches.safetensors")
    expected = json.loads((PARITY / "losses.json").read_text())["losses"][name]
    mask = stored["grpo/prompt_mask"].astype(bool)
    is_new = stored["grpo/completion_mask"].astype(bool)
    groups = stored["grpo/rewards"].shape
    prompts = {"tokens": stored["grpo/prompt_ids"][:: groups[1]], "mask": mask[:: groups[1]]}
    tokens = np.where(is_new, stored["grpo/completion_ids"], -1)

    def pack(numbers):
        return train.pack_rollouts(prompts, Samples(tokens, numbers), found, mask.shape[1] + is_new.shape[1])

    found = train.objectives.group_advantages(stored["grpo/rewards"], **page["ADVANTAGES"].get(loss, {}))
    np.testing.assert_allclose(found.reshape(-1), stored[f"grpo/advantages_{advantages}"], rtol=1e-5, atol=1e-6)
    batch, rollouts = pack(stored["grpo/old_log_probs"])
    rollouts = replace(rollouts, reference=pack(stored["grpo/reference_log_probs"])[1].sampler)

    def loss_fn(model, batch, rollouts):
        log_probs = zoo.log_probs(model, batch, temperature=temperature)
        old = rollouts.sampler
        if name == "grpo_on_policy":
            old = lax.stop_gradient(log_probs)
        weights = batch["weights"]
        total, count = page[loss](log_probs, old, rollouts.advantages, weights, **options)
        if beta:  # averaged like the loss of GRPO
            total += beta * train.objectives.per_row(page["kl_term"](log_probs, old, rollouts.reference), weights)[0]
        return total, count

    model = zoo.load(PARITY / "policy", dtype="float32", mesh=ONE_DEVICE)
    gradient = eqx.filter_jit(zoo.value_and_grad(loss_fn, ONE_DEVICE))
    value, grads = gradient(model, *zoo.place_batch((batch, rollouts), ONE_DEVICE))
    assert value == pytest.approx(expected["loss"], rel=1e-5, abs=1e-7)
    assert optax.tree.norm(grads) == pytest.approx(expected["gradient_norm"], rel=1e-5)
