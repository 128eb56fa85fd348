"""Distillation has TRL's values and gradients, and the values of its formulas in float64, on any mesh."""

from functools import partial

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import zoo
from tests.train.objectives.trl import (
    FOLDER,
    MESHES,
    TOLERANCE,
    find_errors,
    make_rows,
    needs_parity,
    on_each_mesh,
    read_arrays,
    read_values,
)
from zoo.layers import Dropout, Embedding, RMSNorm
from zoo.models.decoder import Decoder, UnrolledStack
from zoo.parallel import Module
from zoo.train import objectives
from zoo.train.objectives import HiddenProjections, jensen_shannon
from zoo.train.objectives.distillation import top_k_log_probs
from zoo.train.objectives.divergence import top_k_divergence

KEY = jax.random.key(0)
OPTIONS = {
    "kd_forward": {"beta": 0.0},
    "kd_reverse": {"beta": 1.0},
    "kd_jsd": {"beta": 0.5},
    "kd_jsd_temperature": {"beta": 0.3, "temperature": 2.0},
}


def compute_losses(model, batch, teacher):
    weights = batch["weights"]
    divergences = {
        name: objectives.distillation(model, teacher, batch, chunk=32, **options) for name, options in OPTIONS.items()
    }
    return {name: ((divergence * weights).sum(), weights.sum()) for name, divergence in divergences.items()}


@needs_parity
@on_each_mesh
def test_divergences_are_those_of_trl(mesh_name):
    texts = read_arrays("pairs/")
    batch = make_rows(*(texts[name] for name in ("input_ids", "attention_mask", "completion_mask")), 24)
    student = zoo.load(FOLDER / "policy", dtype="float32")
    teacher = zoo.load(FOLDER / "reference", dtype="float32")
    values = read_values()
    expected = {name: values[name] for name in OPTIONS}
    for name, options in OPTIONS.items():
        assert {key: expected[name]["options"].get(key, options[key]) for key in options} == options
    errors = find_errors(compute_losses, expected, student, batch, mesh_name, teacher)
    assert max(errors.values()) < TOLERANCE, errors


def softmax(logits):
    logits = np.asarray(logits, np.float64)
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def kl(p, q):
    return np.where(p > 0, p * (np.log(np.where(p > 0, p, 1)) - np.log(q)), 0).sum(-1)


def compute_plainly(student_logits, teacher_logits, beta, temperature):
    p = softmax(np.asarray(teacher_logits, np.float64) / temperature)
    q = softmax(np.asarray(student_logits, np.float64) / temperature)
    if beta in (0, 1):
        return kl(q, p) if beta else kl(p, q)
    m = beta * p + (1 - beta) * q
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


VOCAB = 7
numbers = st.floats(-20, 20, width=32)
logits = st.lists(numbers, min_size=VOCAB, max_size=VOCAB).map(lambda x: np.array(x, np.float32))
rates = st.sampled_from([0.0, 0.1, 0.5, 1.0])


compute = jax.jit(jensen_shannon, static_argnames="beta")


@hypothesis.settings(max_examples=50)
@hypothesis.given(logits, logits, rates, st.sampled_from([0.5, 1.0, 3.0]))
def test_divergence_of_two_distributions(student, teacher, beta, temperature):
    options = {"beta": beta, "temperature": temperature}
    found = float(compute(student, teacher, **options))
    assert found == pytest.approx(compute_plainly(student, teacher, beta, temperature), rel=1e-5, abs=1e-5)
    assert found >= -1e-6
    assert abs(float(compute(student, student + 1, **options))) < 1e-6  # one distribution
    assert abs(float(compute(student, student, **options))) < 1e-6


@partial(jax.jit, static_argnames="k")
def compute_both(student, teacher, temperature, k):
    """Return value and gradient of the divergence, and of k tokens; and the latter's value, rounded to float16."""
    log_probs, ids = jax.lax.top_k(jax.nn.log_softmax(teacher / temperature), k)
    compute_some = lambda student, log_probs: top_k_divergence(student, ids, log_probs, temperature=temperature)
    of_all = jax.value_and_grad(jensen_shannon)(student, teacher, temperature=temperature)
    rounded = compute_some(student, log_probs.astype(jnp.float16))
    return of_all, jax.value_and_grad(compute_some)(student, log_probs), rounded


@hypothesis.settings(max_examples=50)
@hypothesis.given(logits, logits, st.sampled_from([1, 3, VOCAB]), st.sampled_from([0.5, 1.0]))
def test_divergence_of_the_likeliest_tokens(student, teacher, k, temperature):
    (expected, expected_grad), (found, grad), rounded = compute_both(student, teacher, temperature, k)
    assert np.isfinite(grad).all()
    assert -1e-6 <= found <= expected + 1e-5 * max(1, abs(float(expected)))
    if k == VOCAB:
        assert found == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-4, atol=1e-6)
    assert rounded >= -1e-6
    assert rounded == pytest.approx(float(found), abs=0.1)


def test_the_likeliest_tokens_of_a_sharded_vocabulary():
    """The logits of one shard are 100 above the other's: of the second in one row, of the first in the other."""
    student, teacher = np.random.default_rng(0).normal(size=(2, 2, 8)).astype(np.float32)
    student[0, 4:] += 100
    student[1, :4] += 100
    log_probs, ids = jax.lax.top_k(jax.nn.log_softmax(teacher), 3)

    class Logits(Module):
        x: Float[Array, "batch vocab"]

    def run(student, ids, log_probs):
        return top_k_divergence(student.x, ids, log_probs)

    mesh = zoo.make_mesh(data=1, tensor=2, devices=jax.devices()[:2])
    found = zoo.spmd(run, mesh, out="batch")(zoo.place_batch(Logits(jnp.asarray(student)), mesh), ids, log_probs)
    p, q = softmax(teacher), softmax(student)
    for row, listed in enumerate(np.asarray(ids)):
        classes = [np.append(x[row, listed], np.delete(x[row], listed).sum()) for x in (p, q)]
        assert found[row] == pytest.approx(kl(*classes), rel=1e-5)


def test_shards_of_vocabularies_of_different_sizes():
    """Seven tokens, padded to 8 and to 12. The models have no layers."""

    def make_model(vocab, seed):
        parts = Embedding(vocab, 8, key=jax.random.key(seed)), UnrolledStack(()), RMSNorm(8)
        return Decoder(*parts, head=None, dropout=Dropout(0.0))

    def run(student, teacher, batch):
        top_k = top_k_log_probs(teacher, batch, 3, vocab=7)
        return top_k, objectives.distillation(student, teacher, batch, vocab=7)

    models = make_model(8, 0), make_model(12, 1)
    tokens = jax.random.randint(KEY, (2, 5), 0, 7)
    batch = {"tokens": tokens, "targets": tokens}
    mesh = zoo.make_mesh(data=1, tensor=2, devices=jax.devices()[:2])
    found = zoo.spmd(run, mesh, out=("", "batch seq"))(*zoo.place(models, mesh), batch)
    expected = eqx.filter_jit(run)(*models, batch)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3), found, expected)
    assert (expected[0].ids < 4).any() and (expected[0].ids >= 4).any()


def test_a_token_without_probability():
    """A logit of minus infinity, of both: as in a vocabulary without the token."""
    student, teacher = np.random.default_rng(0).normal(size=(2, VOCAB)).astype(np.float32)
    without = lambda x: np.append(x, np.float32(-np.inf))
    for beta in (0.0, 0.4, 1.0):
        differentiate = jax.jit(jax.value_and_grad(partial(jensen_shannon, beta=beta)))
        value, grad = differentiate(without(student), without(teacher))
        expected, expected_grad = differentiate(student, teacher)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        np.testing.assert_allclose(grad[:-1], expected_grad, atol=1e-6)
        assert grad[-1] == 0


@pytest.fixture(scope="module")
def problem():
    """A student and a teacher of other sizes, with 60 tokens padded to 64 and 72, and a batch with padding."""
    student = zoo.models.Transformer(vocab=64, embed=16, layers=2, heads=2, mlp=32, key=KEY)
    teacher = zoo.models.Transformer(vocab=72, embed=32, layers=3, heads=4, mlp=32, key=jax.random.key(1))
    teacher = jax.tree.map(lambda x: 3 * x if eqx.is_inexact_array(x) else x, teacher)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 60, (8, 17)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": np.where(rng.random((8, 16)) < 0.2, -1, tokens[:, 1:])}
    return student, teacher, batch


@pytest.mark.parametrize(
    "mesh_name",
    [
        "one device",
        pytest.param("fsdp 2 x context 2 x tensor 2", marks=pytest.mark.ci),
        pytest.param("data 2 x fsdp 2 x tensor 2", marks=pytest.mark.slow),
    ],
)
def test_padded_vocabularies_and_hidden_states_on_a_mesh(problem, mesh_name):
    """One program: divergence, top-k of a teacher, log p, and distance of projected hidden states."""
    student, teacher, batch = problem
    sizes, devices, _ = MESHES[mesh_name]
    mesh = zoo.make_mesh(**sizes, devices=jax.devices()[:devices])
    options = {"vocab": 60, "temperature": 2.0, "chunk": 24}
    projections = HiddenProjections(student, teacher, ["0:0", "0:1"], key=KEY)

    def run(student, teacher, projections, batch):
        top_k = top_k_log_probs(teacher, batch, 5, **options)
        all_of_it = top_k_log_probs(teacher, batch, 60, **options)
        terms = objectives.distillation_terms(student, teacher, batch, beta=0.3, projections=projections, **options)
        some = objectives.distillation_top_k(student, batch, top_k.ids, top_k.log_probs, **options)
        return top_k, objectives.distillation_terms(student, all_of_it, batch, **options), some, terms

    placed = zoo.place((student, teacher, projections), mesh)
    out = ("", "batch seq", "batch seq", "batch seq")
    top_k, of_all, some, terms = jax.device_get(zoo.spmd(run, mesh, out=out)(*placed, zoo.place_batch(batch, mesh)))

    tokens = jnp.asarray(batch["tokens"], jnp.int32)

    @eqx.filter_jit
    def run_plainly(model):
        return model(tokens), zoo.hidden_states(model, tokens)

    (q, x), (p, y) = run_plainly(student), run_plainly(teacher)
    is_target = batch["targets"] >= 0
    expected = compute_plainly(q[..., :60], p[..., :60], 0.3, 2.0)
    np.testing.assert_allclose(terms.divergence, np.where(is_target, expected, 0), rtol=1e-4, atol=1e-6)
    log_q = np.take_along_axis(np.log(softmax(q)), np.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
    np.testing.assert_allclose(terms.log_probs, np.where(is_target, log_q, 0), rtol=1e-4, atol=1e-6)
    errors = [(linear(x[1]) - y[layer]) ** 2 for linear, layer in zip(projections.linears, (1, 2), strict=True)]
    distance = np.where(is_target, np.mean(errors, (0, -1)), 0)
    np.testing.assert_allclose(terms.distance, distance, rtol=1e-4, atol=1e-6)
    log_p = np.log(softmax(np.asarray(p[..., :60], np.float64) / 2))
    np.testing.assert_array_equal(top_k.ids, np.argsort(-log_p, -1)[..., :5])
    assert top_k.ids.dtype == np.int32 and top_k.log_probs.dtype == np.float16
    np.testing.assert_allclose(top_k.log_probs, -np.sort(-log_p, -1)[..., :5], rtol=1e-3)
    forward = compute_plainly(q[..., :60], p[..., :60], 0.0, 2.0)
    np.testing.assert_allclose(of_all.divergence, np.where(is_target, forward, 0), rtol=1e-2, atol=1e-3)
    assert (some[~is_target] == 0).all() and (some <= forward + 1e-2).all() and (some[is_target] > 0).all()
