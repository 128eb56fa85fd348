"""log p and entropy of targets equal the written-out formula, `zoo.score` and `zoo.cross_entropy`: values and
gradients."""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Array, Float

import zoo
from tests.models.test_scoring import SIZES, random_tokens
from zoo.models.log_probs import compute_entropy, log_softmax, map_logits
from zoo.parallel import Module

KEY = jax.random.key(0)
FIXTURES = sorted((Path(__file__).parents[1] / "fixtures" / "models").iterdir())


@pytest.fixture(scope="module")
def model():
    return zoo.models.Transformer(**SIZES, tied=False, soft_cap=30.0, key=KEY)


def make_batch(rows=4, seq=12, seed=1):
    """Rows of two documents with padding at the end, some targets ignored, and weights."""
    tokens = random_tokens((rows, seq), seed)
    segment_ids = jnp.broadcast_to(jnp.array([1] * 5 + [2] * (seq - 7) + [0] * 2), tokens.shape)
    weights = jax.random.uniform(jax.random.key(2), tokens.shape)
    is_ignored = (segment_ids == 0) | (weights < 0.2)
    return {
        "tokens": tokens,
        "targets": jnp.where(is_ignored, -1, jnp.roll(tokens, -1, axis=1)),
        "weights": weights,
        "segment_ids": segment_ids,
        "positions": jnp.broadcast_to(jnp.array([*range(5), *range(seq - 7), 0, 0]), tokens.shape),
    }


def write_out(logits, targets, temperature):
    """log p of the targets, and the entropies, in float64."""
    x = np.asarray(logits, np.float64) / temperature
    x = x - x.max(-1, keepdims=True)
    logs = x - np.log(np.exp(x).sum(-1, keepdims=True))
    found = np.take_along_axis(logs, np.maximum(targets, 0)[..., None], -1)[..., 0]
    entropies = -(np.exp(logs) * logs).sum(-1)
    return (np.where(targets < 0, 0, y) for y in (found, entropies))


@eqx.filter_jit
def compute(model, batch, temperature, chunk):
    logits = model(batch["tokens"], segment_ids=batch["segment_ids"], positions=batch["positions"])
    return logits, zoo.log_probs(model, batch, temperature=temperature, entropy=True, chunk=chunk)


@given(temperature=st.floats(0.05, 8.0), chunk=st.sampled_from([1, 7, 48, 1024]), seed=st.integers(0, 9))
def test_values_are_the_written_out_formula(model, temperature, chunk, seed):
    batch = make_batch(seed=seed)
    logits, found = compute(model, batch, temperature, chunk)
    expected = write_out(logits, np.asarray(batch["targets"]), temperature)
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == jnp.float32
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=2e-5 / temperature)


def check_equal_to_cross_entropy(model, batch, mesh=None):
    """-sum(weights * log p) has the value and the gradient of `zoo.cross_entropy`."""
    mesh = mesh or zoo.make_mesh(devices=jax.devices()[:1])

    def by_log_probs(model, batch):
        log_p = zoo.log_probs(model, batch, chunk=7)
        weights = jnp.where(batch["targets"] < 0, 0, batch["weights"])
        return -(log_p * weights).sum(), weights.sum()

    @eqx.filter_jit
    def both(model, batch):
        found = zoo.value_and_grad(by_log_probs, mesh)(model, batch)
        return found, zoo.value_and_grad(zoo.cross_entropy, mesh)(model, batch)

    found, expected = jax.device_get(both(zoo.place(model, mesh), zoo.place_batch(batch, mesh)))
    assert found[0] == pytest.approx(float(expected[0]), rel=1e-5)
    scale = max(np.abs(x).max() for x in jax.tree.leaves(expected[1]))
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * scale)


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 1, "fsdp": 2, "context": 2, "tensor": 2},
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.ci),
    ],
    ids=str,
)
def test_negated_and_weighted_it_is_the_cross_entropy(model, sizes):
    check_equal_to_cross_entropy(model, make_batch(), zoo.make_mesh(**sizes))


@pytest.mark.slow  # every family
@pytest.mark.parametrize("folder", FIXTURES, ids=lambda folder: folder.name)
def test_every_family_has_the_log_probs_of_its_cross_entropy(folder):
    model = zoo.load(folder, dtype="float32")
    vocab = model.embedding.table_shape[0]
    batch = make_batch()
    batch["tokens"] = batch["tokens"] % vocab
    batch["targets"] = jnp.where(batch["targets"] < 0, -1, batch["targets"] % vocab)
    check_equal_to_cross_entropy(model, batch)


def test_next_tokens_have_the_scores_of_score(model):
    tokens = random_tokens((2, 10))
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1)}
    log_p, scores = eqx.filter_jit(lambda model: (zoo.log_probs(model, batch), zoo.score(model, tokens)))(model)
    assert np.array_equal(log_p[:, :-1], scores)


def test_entropies_of_a_sharded_vocabulary():
    """Also where logits are minus infinity: 0 log 0 is 0."""
    logits = jax.random.normal(KEY, (4, 6, 32)).at[0, 0, 3:].set(-jnp.inf)
    mesh = zoo.make_mesh(data=2, tensor=4)

    class Logits(Module):
        x: Float[Array, "batch seq vocab"]

    def run(logits):
        return compute_entropy(logits.x), log_softmax(logits.x)

    run = zoo.spmd(run, mesh, out=("batch seq", "batch seq vocab"))
    entropies, logs = run(zoo.place_batch(Logits(logits), mesh))
    np.testing.assert_allclose(logs, jax.nn.log_softmax(logits), rtol=1e-5, atol=1e-6)
    assert entropies[0, 0] == pytest.approx(float(-(jnp.exp(logs[0, 0, :3]) * logs[0, 0, :3]).sum()), rel=1e-5)
    p = jax.nn.softmax(logits[1:])
    np.testing.assert_allclose(entropies[1:], -(p * jnp.log(p)).sum(-1), rtol=1e-5)


def test_entropy_has_no_gradient(model):
    batch = make_batch()

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model):
        return zoo.log_probs(model, batch, entropy=True)[1].sum()

    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(gradient(model)))


def test_gradients_of_a_bfloat16_head_are_summed_in_float32():
    """512 chunks of one token, each with a gradient of 1: in bfloat16 their sum would stop at 256."""
    head = zoo.cast(zoo.layers.Linear(1, 1, key=KEY), "bfloat16")
    x = jnp.ones((1, 512, 1), jnp.bfloat16)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(head):
        return map_logits(lambda logits, _: logits[:, 0], [(head, x)], jnp.zeros((1, 512), int), 1).sum()

    assert gradient(head).weight.item() == 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "temperature=0: expected a number above 0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"chunk": 0}, "chunk is a number of tokens"),
    ],
)
def test_options_out_of_range_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        zoo.log_probs(model, make_batch(), **options)


def test_unknown_keys_of_a_batch_are_refused(model):
    batch = {**make_batch(), "segments": jnp.ones((4, 12), int)}
    with pytest.raises(ValueError, match="'segments' that nothing reads; did you mean 'segment_ids'"):
        zoo.log_probs(model, batch)
