"""Attributes of PyTorch's modules that models here lack: a line that says what to do, and nothing else changes."""

import copy
import dataclasses
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import zoo
from zoo.models.torch_habits import TORCH_HABITS

SIZES = {"embed": 8, "layers": 1, "heads": 2, "mlp": 8, "key": jax.random.key(0)}


@pytest.fixture(scope="module")
def model():
    return zoo.models.Transformer(vocab=8, **SIZES)


@pytest.mark.parametrize("name", TORCH_HABITS)
def test_a_habit_is_answered(model, name):
    with pytest.raises(AttributeError) as caught:
        getattr(model, name)
    assert str(caught.value) == f"'Decoder' object has no attribute '{name}': {TORCH_HABITS[name]}"
    assert not hasattr(model, name) and getattr(model, name, 3) == 3


def test_encoders_answer_too():
    texts = zoo.models.ModernBERT(vocab=8, **SIZES)
    images = zoo.models.VisionTransformer(classes=2, image_size=4, patch_size=2, **SIZES)
    for encoder in (texts, images):
        with pytest.raises(AttributeError, match="no attribute 'eval': a model has no modes"):
            encoder.eval()  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(TypeError, match="eqx.filter_jit"):
            hash(encoder)


def test_other_attributes_are_as_before(model):
    with pytest.raises(AttributeError, match="^'Decoder' object has no attribute 'stak'$"):
        _ = model.stak
    assert eqx.tree_equal(copy.copy(model), model)
    assert eqx.tree_equal(dataclasses.replace(model), model)
    assert eqx.tree_equal(jax.tree.map(lambda x: x, model), model)
    assert isinstance(copy.deepcopy(model), zoo.models.Decoder)
    plain = zoo.set_implementations(model, attention="reference")
    shapes = jax.tree.map(jnp.shape, dataclasses.replace(plain, stack=plain.norm))
    assert eqx.tree_equal(pickle.loads(pickle.dumps(shapes)), shapes)


def test_a_model_has_a_hash_where_its_leaves_have_one(model):
    numbers = jax.tree.map(lambda x: 1, model)
    assert hash(numbers) == hash(jax.tree.map(lambda x: 1, model))


def test_jit_of_a_model_names_filter_jit(model):
    tokens = jnp.zeros((1, 3), int)
    with pytest.raises(TypeError, match="Instead of jax.jit.model., compile .* eqx.filter_jit"):
        jax.jit(model)(tokens)
    assert eqx.filter_jit(model)(tokens).shape == (1, 3, 8)
    assert jax.jit(lambda model: model.norm.weight)(model).shape == (8,)
