"""Natural mistakes at the library's door: each is one line that says what was expected and what came."""

from functools import cache, partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo._checks import parse_dtype
from zoo.layers.token_info import batch_token_info

KEY = jax.random.key(0)
MODELS = {
    "transformer": partial(zoo.models.Transformer, vocab=32, embed=8, layers=1, heads=2, mlp=8),
    "mamba": partial(zoo.models.Mamba, vocab=32, embed=8, layers=1),
}
TOKENS = jnp.arange(10).reshape(2, 5)
CALLS = {
    "the model": lambda model, tokens: model(tokens),
    "hidden_states": zoo.hidden_states,
    "score": zoo.score,
    "generate": lambda model, tokens: zoo.generate(model, tokens, max_new_tokens=2),
    "cross_entropy": lambda model, tokens: zoo.cross_entropy(model, {"tokens": tokens, "targets": tokens}),
}
MISTAKES = {
    "one dim": (TOKENS[0], ValueError, r"""expected an array of dims "batch seq", got one of shape \(5,\)"""),
    "three dims": (
        TOKENS[None],
        ValueError,
        r"""expected an array of dims "batch seq", got one of shape \(1, 2, 5\)$""",
    ),
    "floats": (TOKENS.astype(jnp.float32), TypeError, r"expected integers, got float32$"),
    "a list": (TOKENS.tolist(), TypeError, r"""expected an array of integers "batch seq", got list$"""),
    "an id beyond": (TOKENS.at[1, 4].set(32), ValueError, r"32,? .*outside the vocabulary of 32 tokens"),
    "a negative id": (np.where(TOKENS == 3, -5, TOKENS), ValueError, r"-5,? .*outside the vocabulary of 32 tokens"),
}


@cache
def make_model(kind):
    return eqx.filter_jit(MODELS[kind])(key=KEY)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_tokens_are_checked_at_every_door(no_type_checks, kind, call, mistake):
    tokens, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message) as raised:
        CALLS[call](make_model(kind), tokens)
    assert "\n" not in str(raised.value)


@pytest.mark.one_case
@pytest.mark.parametrize("kind", MODELS)
def test_ids_outside_the_vocabulary_give_nan_inside_programs(kind):
    model, tokens = make_model(kind), TOKENS.at[1, 4].set(32)
    logits = jax.jit(lambda tokens: model(tokens))(tokens)
    assert jnp.isnan(logits[1, 4]).all() and jnp.isfinite(logits[0]).all()
    score = jax.jit(lambda tokens: zoo.score(model, tokens))
    for token in (32, -5):
        scores = score(TOKENS.at[1, 4].set(token))
        assert jnp.isnan(scores[1, 3]) and jnp.isfinite(scores[0]).all()


BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
BATCHES = {
    "an array": (TOKENS, TypeError, r"a batch is a mapping with tokens and targets, not \w+"),
    "no targets": ({"tokens": TOKENS}, ValueError, r"the batch has no targets, only tokens$"),
    "no tokens": ({"targets": TOKENS}, ValueError, r"the batch has no tokens, only targets$"),
    "short targets": (
        BATCH | {"targets": TOKENS[:, 2:]},
        ValueError,
        r"targets: expected the shape of tokens, \(2, 4\), got \(2, 3\): one target per token",
    ),
    "weights per row": (BATCH | {"weights": jnp.ones(2)}, ValueError, r"weights: expected the shape of"),
    "float targets": (
        BATCH | {"targets": jnp.ones((2, 4))},
        TypeError,
        r"targets: expected integers, got float32",
    ),
    "float segments": (BATCH | {"segment_ids": jnp.ones((2, 4))}, TypeError, r"segment_ids: expected integers"),
    "a target beyond": (
        BATCH | {"targets": jnp.full((2, 4), 32)},
        ValueError,
        r"targets: 32 is outside the vocabulary of 32 tokens; a negative target is ignored",
    ),
    "segment_id": (
        BATCH | {"segment_id": TOKENS},
        ValueError,
        r"key 'segment_id' that .* did you mean 'segment_ids'\?",
    ),
    "weight": (BATCH | {"weight": TOKENS}, ValueError, r"key 'weight' that .* did you mean 'weights'\?"),
    "mask": (
        BATCH | {"mask": TOKENS},
        ValueError,
        r"key 'mask' that nothing reads; The keys are tokens, targets, weights, segment_ids, positions, reference",
    ),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mistake", BATCHES)
def test_batches_are_checked_before_the_loss(no_type_checks, kind, mistake):
    batch, error, message = BATCHES[mistake]
    with pytest.raises(error, match=message) as raised:
        zoo.cross_entropy(make_model(kind), batch)
    assert "\n" not in str(raised.value)


def test_batches_are_checked_when_a_step_is_traced():
    mesh, batch = zoo.make_mesh(devices=jax.devices()[:1]), BATCH | {"label": TOKENS[:, 1:]}
    with pytest.raises(ValueError, match="the batch has a key 'label' that nothing reads"):
        zoo.value_and_grad(zoo.cross_entropy, mesh)(make_model("transformer"), batch)
    with pytest.raises(ValueError, match="the batch has a key 'label' that nothing reads"):
        batch_token_info(batch)


@pytest.mark.parametrize(
    ("dtype", "suggestion"),
    [
        ("bfloat", "; did you mean 'bfloat16'"),
        ("bf16", "; did you mean 'bfloat16'"),
        ("fp32", "; did you mean 'float32'"),
        ("torch.float16", "; did you mean 'float16'"),
        (None, ", as one of float32, bfloat16, float16"),
        (3, ", as one of float32, bfloat16, float16"),
    ],
)
def test_an_unknown_dtype_is_named_with_the_nearest(dtype, suggestion):
    with pytest.raises(TypeError, match=f"^dtype={dtype!r}: expected a dtype{suggestion}"):
        zoo.cast(make_model("mamba"), dtype)


def test_parameters_are_cast_to_floating_point_only():
    """Integers cut off what follows the point, without a word."""
    with pytest.raises(ValueError, match="^dtype=int8: parameters are floating point"):
        zoo.cast(make_model("mamba"), "int8")
    for dtype in ("bfloat16", jnp.bfloat16, np.dtype("float32"), float):
        assert parse_dtype(dtype) == jnp.dtype(dtype)


IMAGES = zoo.models.VisionTransformer(image_size=4, patch_size=2, classes=2, embed=8, layers=1, heads=2, mlp=8, key=KEY)


@pytest.mark.parametrize("call", ["hidden_states", "score", "cross_entropy"])
def test_a_model_of_images_is_named_where_tokens_are_read(call):
    with pytest.raises(TypeError, match="expected a model of tokens, and ImageEncoder reads images: model.images."):
        CALLS[call](IMAGES, TOKENS)
    images = jnp.zeros((2, 3, 4, 4))
    assert IMAGES.hidden(images, IMAGES.token_info(images)).x.shape == (2, 5, 8)


def test_an_encoder_scores_nothing():
    """It sees the token whose probability it would give."""
    encoder = zoo.models.ModernBERT(vocab=32, embed=8, layers=1, heads=2, mlp=8, key=KEY)
    with pytest.raises(TypeError, match="an Encoder attends in both directions"):
        zoo.score(encoder, TOKENS)
