"""Values captured while generating are those of a pass over the whole text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo

KEY = jax.random.key(0)
TOKENS = jax.random.randint(jax.random.key(1), (8, 5), 0, 32)
NAMES = ("layers.*", "layers.1.attention", "layers.*.attention.keys", "norm")
PROBABILITIES = "layers.1.attention.probabilities"
NEW = 6


@pytest.fixture(scope="module")
def model():
    sizes = {"vocab": 32, "embed": 16, "layers": 3, "heads": 4, "kv_heads": 2, "mlp": 24}
    return zoo.models.Transformer(**sizes, key=KEY)


@pytest.fixture(scope="module")
def generated(model):
    return zoo.generate(model, TOKENS, max_new_tokens=NEW, details=True, capture=(*NAMES, PROBABILITIES))


def take_new(value, name):
    """Take the tokens that predicted the new ones."""
    axis = 2 if "*" in name else 1
    return jnp.take(value, jnp.arange(4, 4 + NEW), axis=axis)


@pytest.mark.ci
def test_values_are_those_of_the_whole_text(model, generated):
    text = jnp.concatenate([TOKENS, generated.tokens], axis=1)
    _, seen = zoo.capture(model, *NAMES, PROBABILITIES)(text)
    for name in NAMES:
        assert generated.values[name].shape == take_new(seen[name], name).shape
        np.testing.assert_allclose(generated.values[name], take_new(seen[name], name), atol=2e-6, err_msg=name)
    # keys lie in the slots of the cache, which are in the order of the text
    weights = seen[PROBABILITIES][:, :, 4 : 4 + NEW, : text.shape[1]]
    np.testing.assert_allclose(generated.values[PROBABILITIES][..., : text.shape[1]], weights, atol=2e-6)


def test_tokens_are_those_without_a_capture(model, generated):
    plain = zoo.generate(model, TOKENS, max_new_tokens=NEW)
    np.testing.assert_array_equal(generated.tokens, plain)
    streamed = []
    options = {"max_new_tokens": NEW, "details": True, "callback": streamed.append}
    again = zoo.generate(model, TOKENS, capture=NAMES, **options)
    np.testing.assert_array_equal(np.stack(streamed, axis=1), plain)
    for name in NAMES:
        np.testing.assert_allclose(again.values[name], generated.values[name], atol=1e-6)


def test_values_on_a_mesh(model, generated):
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    options = {"max_new_tokens": NEW, "details": True, "mesh": mesh}
    placed = zoo.generate(zoo.place(model, mesh), TOKENS, capture=(*NAMES, PROBABILITIES), **options)
    np.testing.assert_array_equal(placed.tokens, generated.tokens)
    for name, value in placed.values.items():
        np.testing.assert_allclose(np.asarray(value), generated.values[name], atol=5e-6, err_msg=name)
    spec = placed.values["layers.*.attention.keys"].array.sharding.spec
    assert spec == jax.sharding.PartitionSpec(None, ("data", "fsdp"), None, "tensor")


def test_what_cannot_be_captured_is_an_error(model):
    generate = lambda **options: zoo.generate(model, TOKENS, max_new_tokens=NEW, **options)
    with pytest.raises(ValueError, match=r"capture=\['norm'\]: values are returned with details=True"):
        generate(capture=("norm",))
    with pytest.raises(TypeError, match="capture is a sequence of names"):
        generate(capture="norm", details=True)
    with pytest.raises(ValueError, match="no value is named 'nope'"):
        generate(capture=("nope",), details=True)
    with pytest.raises(NotImplementedError, match="a draft is read several tokens at a time"):
        generate(capture=("norm",), details=True, draft="prompt")
