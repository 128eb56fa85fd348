"""Replacement of the implementations of a model's layers: all of them, in any tree, or an error that says what."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import Attention, GatedDeltaNet
from zoo.models import Hybrid, MixtureOfExperts, Transformer
from zoo.ops.attention import reference_attention

TOKENS = jnp.arange(12).reshape(2, 6)


def collect(model, name="implementation"):
    """Return the values of a field in the layers of a model, sorted."""
    nodes = jax.tree.leaves(model, is_leaf=lambda x: hasattr(x, name))
    return sorted(getattr(x, name) for x in nodes if hasattr(x, name))


@pytest.mark.slow
def test_replacement_reaches_stacked_layers_and_keeps_values():
    layers = [partial(GatedDeltaNet, heads=2)] * 2 + [partial(Attention, heads=2)]
    model = Hybrid(vocab=32, embed=16, layers=3, mlp=32, pattern=layers, key=jax.random.key(0))
    assert collect(model) == ["auto", "auto"]
    other = zoo.set_implementations(model, attention="reference", recurrence="recurrent")
    assert collect(other) == ["recurrent", "reference"]
    assert collect(model) == ["auto", "auto"]
    assert all(a is b for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(other), strict=True))
    np.testing.assert_allclose(other(TOKENS), model(TOKENS), atol=1e-5)


@pytest.mark.slow
def test_replacement_reaches_experts_under_adapters():
    model = MixtureOfExperts(
        vocab=32, embed=16, heads=2, layers=2, mlp=8, experts=4, top=2, remat="none", key=jax.random.key(0)
    )
    model = zoo.adapters.lora(model, rank=2, targets=["up", "down"], key=jax.random.key(1))
    other = zoo.set_implementations(model, grouped_matmul="ragged")
    count = lambda model: str(jax.make_jaxpr(model)(TOKENS)).count("ragged_dot")
    assert count(model) == 0 < count(other)
    np.testing.assert_allclose(other(TOKENS), model(TOKENS), atol=1e-5)


def test_replacement_takes_a_function():
    model = Transformer(vocab=32, embed=16, heads=2, layers=1, mlp=8, key=jax.random.key(0))
    calls = []

    def spy(*args, **kwargs):
        calls.append(args)
        return reference_attention(*args, **kwargs)

    zoo.set_implementations(model, attention=spy)(TOKENS)
    assert calls


def test_replacement_refuses_what_no_layer_has():
    model = eqx.filter_eval_shape(partial(zoo.models.Mamba, vocab=32, embed=16, layers=1), key=jax.random.key(0))
    with pytest.raises(ValueError, match="attention='grouped': Decoder has no layer that computes it"):
        zoo.set_implementations(model, attention="grouped")
    with pytest.raises(ValueError, match="selective scan has no implementation 'pallas': there are auto, chunked, rec"):
        zoo.set_implementations(model, recurrence="pallas")
    with pytest.raises(ValueError, match="attention has no implementation 'quick'"):
        Attention(16, 2, implementation="quick", key=jax.random.key(0))


def test_configure_sets_options_and_keeps_the_others():
    model = zoo.models.Transformer(vocab=8, embed=8, layers=2, heads=2, mlp=8, remat="dots", key=jax.random.key(0))
    assert zoo.configure(model) is model
    other = zoo.configure(model, loop="scan", attention="reference", routing="tokens")
    stack = other.stack
    assert (stack.remat, stack.loop, stack.routing) == ("dots", "scan", "tokens")
    assert stack.segments[0].blocks[0].mixer.implementation == "reference"
    assert zoo.configure(other, remat="full").stack.remat == "full"
    assert all(a is b for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(other), strict=True))


def test_configure_refuses_what_an_option_does_not_have():
    model = zoo.models.Transformer(vocab=8, embed=8, layers=2, heads=2, mlp=8, key=jax.random.key(0))
    for option, words in {"remat": "remat is one of none", "loop": "loop", "routing": "routing is one of"}.items():
        with pytest.raises(ValueError, match=words):
            zoo.configure(model, **{option: "every"})
    with pytest.raises(ValueError, match=r"recurrence='chunked': Decoder has no layer"):
        zoo.configure(model, recurrence="chunked")
    with pytest.raises(ValueError, match="Linear has no stack of layers"):
        zoo.configure(zoo.layers.Linear(2, 2, key=jax.random.key(0)), remat="full")
