"""Preference losses have TRL's values and gradients, on any mesh and in micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import log_sigmoid

import zoo
from tests.train.objectives.trl import (
    FOLDER,
    MESHES,
    TOLERANCE,
    find_errors,
    make_pair_rows,
    make_rows,
    needs_parity,
    on_each_mesh,
    read_arrays,
    read_values,
)
from zoo import train
from zoo.models.segment_sums import sum_segments
from zoo.train import objectives

CHUNK = 32


def pick(*names):
    values = read_values()
    return {name: values[name] for name in names}


def sum_losses(losses, pairs):
    return (losses * pairs.mask).sum(), pairs.mask.sum()


def compute_pair_losses(model, batch, reference):
    """Every loss of pairs, from one forward of each model."""
    rows = batch["rows"]
    log_p = zoo.log_probs(model, rows, chunk=CHUNK)
    ratio = log_p - jax.lax.stop_gradient(zoo.log_probs(reference, rows, chunk=CHUNK))
    summed = train.sum_pairs(ratio, rows)
    averaged = train.average_pairs(ratio, rows)
    log_p_sums = train.sum_pairs(log_p, rows)
    log_p_means = train.average_pairs(log_p, rows)
    desensitized = train.sum_pairs(ratio, {**rows, **batch["desensitized"]})
    c, d = summed.chosen, summed.rejected
    losses = {
        "dpo": objectives.dpo(c, d),
        "dpo_label_smoothing": objectives.robust_dpo(c, d, label_smoothing=0.1),
        "ipo": objectives.ipo(averaged.chosen, averaged.rejected),
        "hinge": objectives.hinge(c, d),
        "dpo_length_normalized": objectives.dpo(averaged.chosen, averaged.rejected, beta=2.0),
        "apo_zero": objectives.apo_zero(c, d),
        "sppo": (c - 0.5 / 0.1) ** 2 + (d + 0.5 / 0.1) ** 2,
        "nca": -log_sigmoid(0.1 * c) - 0.5 * log_sigmoid(-0.1 * c) - 0.5 * log_sigmoid(-0.1 * d),
        "bco_pair": -log_sigmoid(0.1 * c) - log_sigmoid(-0.1 * d),
        "dpo_forward_kl": objectives.dpo(1 - jnp.exp(-c), 1 - jnp.exp(-d)),
        "ld_dpo": objectives.dpo(desensitized.chosen, desensitized.rejected),
        "simpo": objectives.simpo(log_p_means.chosen, log_p_means.rejected, beta=2.0, gamma=1.0),
        "cpo": objectives.dpo(log_p_sums.chosen, log_p_sums.rejected),
    }
    sums = {name: sum_losses(loss, summed) for name, loss in losses.items()}
    # A second mean, over targets of the chosen texts: its weights come divided by their sum, times the number of pairs.
    # Summed over segments, as the losses are: on a sharded sequence each device has all of both sums.
    answer_nll = -sum_segments(log_p * batch["answers"]["weights"], rows["segment_ids"]).sum()
    text_nll = -sum_segments(log_p * batch["texts"]["weights"], rows["segment_ids"]).sum()
    odds = sum_losses(objectives.orpo(log_p_means.chosen, log_p_means.rejected), summed)
    count = sums["dpo"][1]
    sums["dpo_with_sft"] = (sums["dpo"][0] + 0.2 * answer_nll, count)
    sums["cpo_with_sft"] = (sums["cpo"][0] + answer_nll, count)
    sums["orpo"] = (odds[0] + text_nll, count)
    return sums


PAIR_LOSSES = (
    "dpo dpo_label_smoothing ipo hinge dpo_length_normalized apo_zero sppo nca bco_pair dpo_forward_kl ld_dpo simpo "
    "cpo dpo_with_sft cpo_with_sft orpo"
).split()


@pytest.mark.one_case("slow")
@needs_parity
@on_each_mesh
def test_losses_of_pairs_are_those_of_trl(mesh_name):
    rows = make_pair_rows()
    is_chosen = (rows["segment_ids"] == 1) & (rows["targets"] >= 0)
    weights = rows["weights"]
    # Targets of a completion beyond the length of the shorter one of the pair weigh alpha, 0.5.
    lengths = [(weights * (rows["segment_ids"] == text)).sum(axis=1) for text in (1, 2)]
    place = np.where(rows["segment_ids"] == 1, np.cumsum(weights, 1), np.cumsum(weights, 1) - lengths[0][:, None])
    is_shared = place <= np.minimum(*lengths)[:, None]
    batch = {
        "rows": rows,
        "desensitized": {"weights": np.where(is_shared, weights, 0.5 * weights)},
        "answers": {"weights": normalize(is_chosen * weights)},
        "texts": {"weights": normalize(is_chosen.astype(np.float32))},
    }
    policy = zoo.load(FOLDER / "policy", dtype="float32")
    reference = zoo.load(FOLDER / "reference", dtype="float32")
    errors = find_errors(compute_pair_losses, pick(*PAIR_LOSSES), policy, batch, mesh_name, reference)
    assert max(errors.values()) < TOLERANCE, errors


def normalize(weights):
    """Divide weights by their mean over the rows, so that a sum over them by the number of pairs is their mean."""
    return (weights * len(weights) / weights.sum()).astype(np.float32)


def compute_adapted_loss(model, batch):
    reference = zoo.adapters.remove(model)
    ratio = zoo.log_probs(model, batch, chunk=CHUNK)
    ratio = ratio - jax.lax.stop_gradient(zoo.log_probs(reference, batch, chunk=CHUNK))
    pairs = train.sum_pairs(ratio, batch)
    return {"dpo_lora": sum_losses(objectives.dpo(pairs.chosen, pairs.rejected), pairs)}


@needs_parity
@pytest.mark.ci
@on_each_mesh
def test_without_its_adapters_a_model_is_the_reference(mesh_name):
    base = zoo.load(FOLDER / "reference", dtype="float32")
    model = zoo.adapters.load(base, FOLDER / "adapter")
    errors = find_errors(compute_adapted_loss, pick("dpo_lora"), model, make_pair_rows(), mesh_name)
    assert errors["dpo_lora"] < TOLERANCE


def compute_text_losses(model, batch, reference, divergence):
    rows = batch["texts"]
    ratio = zoo.log_probs(model, rows, chunk=CHUNK)
    ratio = ratio - jax.lax.stop_gradient(zoo.log_probs(reference, rows, chunk=CHUNK))
    ratios = sum_segments(ratio * rows["weights"], rows["segment_ids"], 1)
    options = {"kto": {}, "kto_weighted": {"desirable_weight": 1.2, "undesirable_weight": 0.8}}
    losses = {
        name: objectives.kto(ratios, batch["desirable"][:, None], divergence, **weights)
        for name, weights in options.items()
    }
    return {name: (loss.sum(), jnp.ones(loss.shape).sum()) for name, loss in losses.items()}


def estimate_divergence(policy, reference, mesh_name):
    """The mean log-ratio of mismatched texts, at least 0, from a program of its own."""
    sizes, devices, _ = MESHES[mesh_name]
    mesh = zoo.make_mesh(**sizes, devices=jax.devices()[:devices])
    stored = read_arrays("kto/KL_")
    rows = make_rows(stored["input_ids"], stored["attention_mask"], stored["completion_mask"], 24)

    def sum_ratios(model, batch, reference):
        ratio = zoo.log_probs(model, batch, chunk=CHUNK) - zoo.log_probs(reference, batch, chunk=CHUNK)
        ratios = sum_segments(ratio * batch["weights"], batch["segment_ids"], 1)
        return ratios.sum(), jnp.ones(ratios.shape).sum()

    estimate = zoo.value(sum_ratios, mesh)
    mean = estimate(zoo.place(policy, mesh), zoo.place_batch(rows, mesh), zoo.place(reference, mesh))
    return jnp.maximum(jax.device_get(mean), 0)


@pytest.mark.one_case("slow")
@needs_parity
@on_each_mesh
def test_losses_of_single_texts_are_those_of_trl(mesh_name):
    stored = read_arrays("pairs/")
    rows = make_rows(stored["input_ids"], stored["attention_mask"], stored["completion_mask"], 24)
    policy = zoo.load(FOLDER / "policy", dtype="float32")
    reference = zoo.load(FOLDER / "reference", dtype="float32")
    divergence = estimate_divergence(policy, reference, mesh_name)
    assert divergence > 0
    batch = {"texts": rows, "desirable": np.arange(16) < 8}
    values = pick("kto", "kto_weighted")
    errors = find_errors(compute_text_losses, values, policy, batch, mesh_name, reference, divergence)
    assert max(errors.values()) < TOLERANCE, errors


C = jnp.array([-3.0, 0.5, 2.0])
D = jnp.array([1.0, 0.25, -2.5])


def sig(x):
    return 1 / (1 + np.exp(-x))


def test_losses_are_their_formulas():
    margin = 0.3 * (C - D)
    smoothed = -0.9 * np.log(sig(margin)) - 0.1 * np.log(sig(-margin))
    np.testing.assert_allclose(objectives.dpo(C, D, beta=0.3, label_smoothing=0.1), smoothed, rtol=1e-5)
    down = sig(0.3 * C) + 1 - sig(margin)
    np.testing.assert_allclose(objectives.apo_down(C, D, beta=0.3), down, rtol=1e-5)
    np.testing.assert_allclose(objectives.hinge(C, D, beta=0.3), np.maximum(0, 1 - margin), rtol=1e-5)


def test_odds_near_certainty_are_finite():
    def loss(chosen):
        return objectives.orpo(chosen, jnp.float32(-2.0))

    for log_p in (0.0, -1e-9, -1e-3, -50.0):
        value, gradient = jax.value_and_grad(loss)(jnp.float32(log_p))
        assert np.isfinite(value) and np.isfinite(gradient)
    odds = np.log(0.9 / 0.1) - np.log(np.exp(-2.0) / (1 - np.exp(-2.0)))
    assert loss(jnp.log(0.9)) == pytest.approx(-0.1 * np.log(sig(odds)), rel=1e-5)


def test_a_divergence_moves_both_kinds_of_texts():
    ratios = jnp.array([1.0, 1.0])
    desirable = jnp.array([True, False])
    near, far = (objectives.kto(ratios, desirable, z) for z in (0.0, 2.0))
    np.testing.assert_allclose(near, [1 - sig(0.1), 1 - sig(-0.1)], rtol=1e-6)
    assert far[0] > near[0] and far[1] < near[1]
