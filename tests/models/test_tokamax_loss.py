"""The loss by tokamax: equal to the reference, refused by name where it is not covered, and compiled for TPUs."""

import dataclasses
import importlib.util

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.aot import compile_for, imagine
from zoo.models.loss import reference_cross_entropy
from zoo.models.loss_request import LossRequest
from zoo.models.tokamax_loss import find_tokamax_loss_obstacle, tokamax_cross_entropy
from zoo.ops.platform import target_device, target_platform

VOCAB = 50


def make_model(**options):
    return zoo.models.Transformer(vocab=VOCAB, embed=8, layers=1, heads=2, mlp=8, key=jax.random.key(0), **options)


def draw_batch():
    keys = jax.random.split(jax.random.key(1), 3)
    tokens, targets = (jax.random.randint(key, (2, 6), 0, VOCAB) for key in keys[:2])
    return {"tokens": tokens, "targets": targets.at[0, 3].set(-100), "weights": jax.random.uniform(keys[2], (2, 6))}


@pytest.mark.neighbors("tokamax")
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.ci)])
def test_loss_equals_the_reference(tied):
    """With gradients of parameters and of the weights of targets, of which one is ignored."""
    batch = draw_batch()

    def differentiate(implementation):
        def loss(arguments):
            model, weights = arguments
            return zoo.cross_entropy(model, batch | {"weights": weights}, implementation=implementation)[0]

        return eqx.filter_jit(eqx.filter_value_and_grad(loss))((make_model(tied=tied), batch["weights"]))

    ours, theirs = differentiate("tokamax"), differentiate("reference")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-5), ours, theirs)


@pytest.mark.neighbors("tokamax")
def test_a_target_beyond_the_vocabulary_gives_nan():
    head = make_model().gather_unembedding()
    x, weights = jnp.ones((3, 8)), jnp.ones(3)
    losses = [
        tokamax_cross_entropy(head, x, jnp.array([0, -100, target]), weights, 0.0, 8) for target in (VOCAB - 1, VOCAB)
    ]
    assert jnp.isfinite(losses[0]) and jnp.isnan(losses[1])


def test_loss_says_what_tokamax_does_not_cover(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)

    def explain(table=None, soft_cap=None, z_loss=0.0, **fields):
        head = dataclasses.replace(make_model().gather_unembedding(), soft_cap=soft_cap)
        if table is not None:
            head = dataclasses.replace(head, table=table)
        request = LossRequest.from_head(head, jnp.ones((12, 8)), z_loss, 1024)
        return find_tokamax_loss_obstacle(dataclasses.replace(request, **fields))

    assert explain() is None
    assert "log Z" in str(explain(z_loss=0.1))
    biased = zoo.layers.Linear(8, VOCAB, bias=True, key=jax.random.key(0))
    assert "a bias, a soft cap or a transform" in str(explain(soft_cap=30.0))
    assert "a bias, a soft cap or a transform" in str(explain(biased))
    assert "the vocabulary has 2 shards" in str(explain(vocab_shards=2))
    assert "not float16" in str(explain(dtype=jnp.float16))
    with target_platform("gpu"):
        assert "runs on CPU and TPU" in str(explain())
    with target_platform("tpu"), target_device("a TPU"):
        assert "8 features and a vocabulary of 50 are not multiples of 128" in str(explain())


@pytest.mark.neighbors("tokamax")
@pytest.mark.aot
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:1x1"])
def test_loss_compiles(topology):
    def loss(matrix, x, targets):
        table = zoo.layers.Linear(256, 2048, key=jax.random.key(0)).with_weight(matrix, None)
        head = dataclasses.replace(make_model().gather_unembedding(), table=table)
        return tokamax_cross_entropy(head, x, targets, jnp.ones(len(x)), 0.0, 1024)

    matrix, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2048, 256), (1500, 256)))
    targets = jax.ShapeDtypeStruct((1500,), jnp.int32)
    program = compile_for(topology, jax.grad(loss, argnums=(0, 1)), matrix, x, targets)
    assert program.text.count('custom_call_target="tpu_custom_call"') == 2
    assert "bf16[1500,2048]" not in program.text and "f32[1500,2048]" not in program.text  # no logits in memory


@pytest.mark.neighbors("tokamax")
@pytest.mark.aot
@pytest.mark.slow
def test_tpu_kernel_equals_the_reference_in_the_interpreter():
    from jax.experimental.pallas import tpu as pltpu

    keys = jax.random.split(jax.random.key(0), 3)
    x, matrix = jax.random.normal(keys[0], (200, 128)), jax.random.normal(keys[1], (256, 128)) / 10
    targets = jax.random.randint(keys[2], (200,), 0, 256)
    table = zoo.layers.Linear(128, 256, key=keys[0])

    def differentiate(sum_losses):
        def loss(x, matrix):
            head = dataclasses.replace(make_model().gather_unembedding(), table=table.with_weight(matrix, None))
            return sum_losses(head, x, targets, jnp.ones(200), 0.0, 1024)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, matrix)

    theirs = differentiate(reference_cross_entropy)
    with pltpu.force_tpu_interpret_mode(), target_platform("tpu"), target_device(imagine("v6e:1x1")[0]):
        ours = differentiate(tokamax_cross_entropy)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), ours, theirs)
