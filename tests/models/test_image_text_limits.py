"""What a model of texts with images refuses, in one line and before it computes; and what of it is trained."""

import dataclasses
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import zoo
from tests.models.hf.test_image_text import FIXTURES, IMAGE, make_loss, read_case, read_images
from zoo.generate.image_prompt import read_images as read_images_once
from zoo.layers import Dropout
from zoo.layers.encoders.packed_images import PackedImages
from zoo.layers.kv_cache import is_cache
from zoo.models.image_places import ImageSpans
from zoo.models.parameter_paths import list_parameters

PIXELS, PACKED, MASKED = "llava_clip", "qwen2_vl_image", "idefics3_image"


@pytest.fixture(scope="module")
def cases():
    folders = {name: FIXTURES / name for name in (PIXELS, PACKED, MASKED)}
    return {name: load_case(folder) for name, folder in folders.items()}


def load_case(folder):
    """Return a model, the expectations of its case with texts as arrays of JAX, and its images."""
    expected = read_case(folder)
    texts = {name: jnp.asarray(expected[name]) for name in ("input_ids", "generate.prompt")}
    return zoo.load(folder, dtype=jnp.float32), {**expected, **texts}, read_images(folder, expected)


def catch(function, error, *args, **options):
    with pytest.raises(error) as caught:
        function(*args, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def no_compute(monkeypatch):
    """Fail where a layer would run."""
    monkeypatch.setattr(zoo.models.ImageEncoder, "hidden", None)
    monkeypatch.setattr(zoo.models.Decoder, "hidden", None)


def resize(images, size):
    return jax.tree.map(lambda x: x[..., :size, :size], images)


WRONG = {
    PIXELS: {
        "row 0 has 18 image tokens (73), and its images have 9 features": lambda x: x.at[0, 1].set(0),
        "row 2 has 0 image tokens (73), and its images have 9 features": lambda x: x.at[2, 0].set(1),
        "row 0 has 18 image tokens (73), and its images have 8 features": lambda x: resize(x, 8),
        "expected images of 3 channels, got shape (2, 1, 12, 12)": lambda x: x[:, :, :1],
        "images: expected normalized pixels in floating point, got uint8": lambda x: x.astype(jnp.uint8),
        'images: expected "batch images channels height width", got an array float32[3, 3, 12, 12]': lambda x: x[:, 0],
        'images: expected "batch images channels height width", got PackedImages': lambda x: PackedImages(
            jnp.zeros((3, 4, 48)), jnp.ones((3, 1, 3), int)
        ),
        "images: expected a row for each of 3 texts, got 2": lambda x: x[:2],
    },
    PACKED: {
        "row 0 has 7 image tokens (73, 76), and its images have 4 features": lambda x: dataclasses.replace(
            x, grids=x.grids.at[0, 1].set(0)
        ),
        "row 2 has 0 image tokens (73, 76), and its images have 1 features": lambda x: dataclasses.replace(
            x, grids=x.grids.at[2, 0].set(jnp.array([1, 2, 2]))
        ),
        "row 0 has grids of 28 patches, and pixels of 20: give all of them": lambda x: dataclasses.replace(
            x, pixels=x.pixels[:, :20]
        ),
        "images: expected PackedImages, got an array float32[3, 28, 96]": lambda x: x.pixels,
        "images: expected a row for each of 3 texts, got 1": lambda x: jax.tree.map(lambda x: x[:1], x),
    },
    MASKED: {
        "row 0 has 8 image tokens (73), and its images have 4 features": lambda x: dataclasses.replace(
            x, pixels=x.pixels.at[0, 1].set(0)
        ),
        "row 0 has 8 image tokens (73), and its images have 2 features": lambda x: resize(x, 8),
        "images: expected MaskedImages, got an array float32[3, 2, 3, 16, 16]": lambda x: x.pixels,
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_images_that_are_not_those_of_the_text(name, cases, no_type_checks, no_compute):
    model, expected, images = cases[name]
    tokens = expected["input_ids"]
    batch = {"tokens": tokens, "targets": tokens}
    generate = lambda tokens, images: zoo.generate(model, tokens, images=images, max_new_tokens=1)
    for message, change in WRONG[name].items():
        wrong = change(images)
        for call in (model, generate, lambda tokens, images: zoo.cross_entropy(model, {**batch, "images": images})):
            assert message in catch(call, (TypeError, ValueError), tokens, wrong)
    count = np.isin(tokens[0], model.image_tokens).sum()
    assert f"row 0 has {count} image tokens" in catch(model, ValueError, tokens)


def test_an_image_with_black_pixels_counts(cases):
    model, expected, images = cases[PIXELS]
    model.check_images(expected["input_ids"], images.at[:, 0, :, 0].multiply(0))


def test_the_tower_draws_dropout_of_its_own(cases):
    """From other keys than layers of the text with the same numbers."""
    model, _, images = cases[PIXELS]
    model = dataclasses.replace(model, tower=dataclasses.replace(model.tower, dropout=Dropout(0.5)))
    keys = jax.random.split(jax.random.key(0), 3)
    features, _ = model.embed_images(images, key=keys)
    again, _ = model.embed_images(images, key=keys)
    np.testing.assert_array_equal(features, again)
    each = images.reshape(-1, *images.shape[2:])
    info = model.tower.token_info(each, key=jnp.repeat(keys, 2))
    for other in (info, dataclasses.replace(info, keys=None)):
        x = model.tower.hidden(each, other).x[:, 1:]
        assert np.abs(model.projector(x, (3, 3)).reshape(features.shape) - features).max() > 1e-3


def test_patches_of_another_size(cases, no_type_checks):
    model, expected, images = cases[PACKED]
    wrong = dataclasses.replace(images, pixels=images.pixels[..., :-1])
    assert "expected patches of 96 pixels, got 95" in catch(model, ValueError, expected["input_ids"], wrong)


def test_a_row_with_too_few_features_is_nan_in_programs(cases):
    model, expected, images = cases[PIXELS]
    found = np.asarray(eqx.filter_jit(model)(expected["input_ids"], images[:, :1]))
    assert np.isnan(found[0]).any() and np.isfinite(found[1:]).all()


def test_what_is_not_generated_with_images(cases, no_type_checks):
    model, expected, images = cases[PIXELS]
    tokens = expected["generate.prompt"]
    generate = lambda model, **options: zoo.generate(model, tokens, max_new_tokens=1, **options)
    refused = catch(generate, TypeError, model.decoder, images=images)
    assert refused == "images: Decoder reads texts only, and zoo.models.ImageText reads images"
    assert "unexpected keyword argument 'images'" in catch(model.decoder, TypeError, tokens, images=images)
    for name, value in {"draft": model.decoder, "capture": ("layers.0",)}.items():
        refused = catch(generate, NotImplementedError, model, images=images, **{name: value})
        assert refused.startswith(f"{name}: ") and "leave it out" in refused
    refused = catch(generate, ValueError, model, images=images, prefix=zoo.prefill(model.decoder, tokens))
    assert refused.startswith("prefix: ") and "leave it out" in refused
    assert "model.decoder is its Decoder of texts" in catch(zoo.prefill, TypeError, model, tokens)


@pytest.mark.parametrize("name", WRONG)
def test_meshes_that_are_refused(name, cases):
    model, expected, _ = cases[name]
    loss_fn, batch = make_loss(model, jax.device_get(expected))
    batch = jax.tree.map(lambda x: jnp.concatenate([x, x[:1]]), batch)
    for axis, wanted in {"context": "leave context at 1", "pipe": "use a mesh with pipe=1"}.items():
        mesh = zoo.make_mesh(**{axis: 2}, devices=jax.devices()[:2])
        run = zoo.value_and_grad(loss_fn, mesh)
        assert wanted in catch(run, NotImplementedError, zoo.place(model, mesh), zoo.place_batch(batch, mesh))


def test_spans_that_a_layer_would_not_read():
    model, expected, images = load_case(FIXTURES / "qwen3_5_image")
    wanted = "tokens of images attend to later ones, and GroupedGatedDeltaNet does not look ahead"
    spans = jnp.ones_like(expected["input_ids"])
    assert catch(model, NotImplementedError, expected["input_ids"], images, spans=spans) == wanted
    assert catch(dataclasses.replace, NotImplementedError, model, places=ImageSpans()) == wanted


def test_a_prefix_model_needs_spans_where_tokens_are_predicted():
    """Without images, too; and it generates as it reads: in both directions."""
    model, expected, _ = load_case(FIXTURES / "paligemma_image")
    tokens = expected["input_ids"][2:, :10]
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    for loss_fn in (zoo.cross_entropy, zoo.log_probs):
        assert catch(loss_fn, ValueError, model, batch).endswith("pass spans")
    causal = zoo.cross_entropy(model, {**batch, "spans": jnp.zeros_like(tokens[:, 1:])})
    np.testing.assert_allclose(causal, zoo.cross_entropy(model.decoder, batch), rtol=1e-5)
    first = np.asarray(model(tokens))[:, -1].argmax(-1)
    assert zoo.generate(model, tokens, max_new_tokens=1)[:, 0] == first != model.decoder(tokens)[:, -1].argmax(-1)


@pytest.mark.parametrize("name", ["qwen3_vl_image", "gemma3_image"])
def test_generation_after_a_prompt_that_ends_with_an_image(name):
    """Each token is the most probable one after the whole text before it."""
    model, expected, images = load_case(FIXTURES / name)
    images = jax.tree.map(lambda x: x[:1], images)
    count = np.flatnonzero(expected["input_ids"][0] == IMAGE)[-1] + 1
    prompt = expected["input_ids"][:1, :count]
    new = zoo.generate(model, prompt, images=images, max_new_tokens=6)
    logits = model(jnp.concatenate([prompt, new], axis=1), images)
    np.testing.assert_array_equal(new, logits[:, count - 1 : -1].argmax(-1))


@pytest.mark.parametrize("length", [None, 40])
def test_rope_of_a_prompt_with_images_has_the_length_asked_for(length, cases):
    """Or the number of its tokens."""
    model, expected, images = cases[PIXELS]
    prompt = expected["generate.prompt"]
    _, prefix = read_images_once(model, prompt, images, None, new=2, length=length, samples=1, mesh=None)
    caches = [x for x in jax.tree.leaves(prefix.states, is_leaf=is_cache) if is_cache(x)]
    assert caches and all((x.rope_length == (length or prompt.shape[1])).all() for x in caches)


@pytest.mark.parametrize("name", WRONG)
def test_packed_texts_with_images_equal_rows_alone(name, cases):
    """Two texts in a row, the images of both one after the other."""
    model, expected, images = cases[name]
    tokens = expected["input_ids"]
    counts = images.count_patches().sum(1) if isinstance(images, PackedImages) else [2, 1]
    take = lambda x: jnp.concatenate([x[0, : counts[0]], x[1, : counts[1]]])[None]
    if isinstance(images, PackedImages):
        grids = np.concatenate([x[x.prod(-1) > 0] for x in np.asarray(images.grids)])[None]
        both = PackedImages(take(images.pixels), jnp.asarray(grids))
    else:
        both = jax.tree.map(take, images)
    segments = jnp.repeat(jnp.array([[1, 2]]), tokens.shape[1], axis=1)
    found = model(tokens[:2].reshape(1, -1), both, segment_ids=segments)
    wanted = np.asarray(model(tokens, images))[:2].reshape(found.shape)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("name", WRONG)
def test_bfloat16_of_a_model_is_that_of_its_tower(name, cases):
    model, expected, images = cases[name]
    half = zoo.cast(model, jnp.bfloat16)
    features, _ = jax.eval_shape(lambda images: half.embed_images(images), images)
    assert features.dtype == jnp.bfloat16
    found = np.asarray(half(expected["input_ids"], images), np.float32)
    wanted = np.asarray(model(expected["input_ids"], images))
    assert np.abs(found - wanted).mean() < 0.1 * np.abs(wanted).mean()
    mixed = dataclasses.replace(half, tower=model.tower, projector=model.projector)
    decoder = lambda images: mixed.read(images).layer_inputs(
        expected["input_ids"], jnp.zeros((3, 28, 24), jnp.bfloat16)
    )
    assert jax.eval_shape(decoder, images).x.dtype == jnp.bfloat16, "features have the dtype of the text"


def test_lora_of_decoder_projector_and_tower(cases):
    """By name, of one of the three; the others are frozen, and have no gradient."""
    model, expected, _ = cases[PIXELS]
    loss_fn, batch = make_loss(model, jax.device_get(expected))
    batch = jax.tree.map(jnp.asarray, batch)
    wanted, weight = loss_fn(model, batch)
    parts = {"decoder": r"decoder\..*query", "projector": r"projector\..*", "tower": r"tower\..*value"}
    for part, targets in parts.items():
        adapted = zoo.adapters.lora(model, targets=targets, rank=2, key=jax.random.key(0))
        loss, grads = zoo.value_and_grad(loss_fn, zoo.make_mesh(devices=jax.devices()[:1]))(adapted, batch)
        np.testing.assert_allclose(loss, wanted / weight, rtol=1e-5)
        trained = {path.name: x for path, x in list_parameters(grads) if x is not None and eqx.is_array(x)}
        assert trained and all(name.startswith(part) and ".lora." in name for name in trained), trained.keys()
        ups = [x for name, x in trained.items() if name.endswith("up.weight")]
        assert any(np.abs(x).max() > 0 for x in ups), "of B, which A multiplies"
        assert 0 < zoo.count(adapted) < zoo.count(model) / 10


def test_layers_that_nothing_reads_are_held(cases, tmp_path):
    """Neither trained nor counted nor decayed, and saved byte for byte."""
    model, expected, _ = cases[PIXELS]
    loss_fn, batch = make_loss(model, jax.device_get(expected))
    batch = jax.tree.map(jnp.asarray, batch)
    _, grads = zoo.value_and_grad(loss_fn, zoo.make_mesh(devices=jax.devices()[:1]))(model, batch)
    assert len(jax.tree.leaves(grads)) == len(jax.tree.leaves(zoo.trainable(model))) < len(jax.tree.leaves(model))
    decayed = jax.tree.map(lambda x: 0.5 * x, zoo.trainable(model))
    zoo.save(eqx.combine(decayed, model), tmp_path)
    before, after = (safetensors.numpy.load_file(x / "model.safetensors") for x in (FIXTURES / PIXELS, tmp_path))
    kept = {name for name in before if np.array_equal(before[name], after[name])}
    assert all(".layers.2." in name for name in kept if np.any(before[name])), kept
    held = {name for name in before if re.search(r"vision.*\.layers\.2\.", name)}
    assert held and held <= kept
    assert zoo.count(model) == sum(x.size for name, x in before.items() if name not in held)
