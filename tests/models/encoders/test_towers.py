"""Two towers: the loss by its formula, on meshes, and what it refuses; poolers; patched images; embeddings."""

import dataclasses
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers.encoders.patches import PatchedImages
from zoo.layers.encoders.pooling import EndTokenPooler
from zoo.models import contrastive_loss
from zoo.models.hf.families.siglip_text_model_layers import LastPlacePooler
from zoo.tools.parity.checkpoint import make_loss, read_expectations

FIXTURES = Path(__file__).parents[2] / "fixtures" / "encoders"
ROWS = 8


def make(**sizes):
    options = {"vocab": 12, "length": 6, "end_token": 0, "image_size": 4, "patch_size": 2, "channels": 1, "features": 6}
    options |= {"embed": 8, "layers": 1, "heads": 2, "mlp": 8} | sizes
    return zoo.models.CLIP(**options, key=jax.random.key(0))


def draw(rows: int = ROWS, length: int = 6):
    random = np.random.default_rng(0)
    tokens = random.integers(1, 12, (rows, length))
    tokens[:, -1] = 0
    images = random.standard_normal((rows, 1, 4, 4), np.float32)
    return {"images": jnp.asarray(images), "tokens": jnp.asarray(tokens, jnp.int32)}


def compute_loss(images, texts, scale, bias, kind):
    """The formulas of the docstring, in float64."""
    logits = np.float64(scale) * np.float64(images) @ np.float64(texts).T + bias
    own = np.diag(logits)
    if kind == "softmax":
        return ((np.log(np.exp(logits).sum(1)) + np.log(np.exp(logits).sum(0))) / 2 - own).sum()
    others = np.log1p(np.exp(logits)).sum() - np.log1p(np.exp(own)).sum()
    return np.log1p(np.exp(-own)).sum() + others


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_contrastive_loss_is_its_formula(kind):
    model = make()
    bias = None if kind == "softmax" else jnp.float32(-1.5)
    model = dataclasses.replace(model, similarity=dataclasses.replace(model.similarity, bias=bias))
    batch = draw()
    total, count = eqx.filter_jit(contrastive_loss)(model, batch)
    images, texts = zoo.embed(model, images=batch["images"]), zoo.embed(model, batch["tokens"])
    np.testing.assert_allclose(jnp.linalg.norm(images, axis=1), 1, rtol=1e-6)
    wanted = compute_loss(images, texts, np.exp(model.similarity.log_scale), 0 if bias is None else bias, kind)
    assert count == ROWS
    np.testing.assert_allclose(total, wanted, rtol=1e-5)
    np.testing.assert_allclose(contrastive_loss(model, batch, kind=kind)[0], total, rtol=1e-6)


MESHES = {
    "axes": {"data": 2, "fsdp": 2, "tensor": 2},
    "experts": {"data": 2, "expert": 4},
    "zero2": {"data": 2, "fsdp": 4, "layout": zoo.parallel.ZERO2},
    "pipe": {"data": 4, "pipe": 2},
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("case", ["clip_pairs", "siglip2_pairs"])
def test_a_whole_batch_is_compared_on_any_mesh(case, name):
    """One row per device; without a mask, so that positions are counted from a cast and sharded table."""
    model = zoo.load(FIXTURES / case, dtype="float32")
    _, batch = make_loss(model, read_expectations(FIXTURES / case / "expected.safetensors"))
    batch = jax.tree.map(lambda x: np.concatenate(4 * [x]), {key: batch[key] for key in ("tokens", "images")})
    batch["tokens"] = batch["tokens"] ^ np.arange(ROWS)[:, None] // 2  # texts differ, and so do their losses
    options = {"microbatches": 2} if name == "pipe" else {}

    def loss_fn(model, batch):
        return contrastive_loss(zoo.cast(model, "float32"), batch)

    meshes = (zoo.make_mesh(devices=jax.devices()[:1]), zoo.make_mesh(**MESHES[name]))
    with jax.default_matmul_precision("highest"):
        results = [
            zoo.value_and_grad(loss_fn, mesh, **given)(zoo.place(model, mesh), zoo.place_batch(batch, mesh))
            for mesh, given in zip(meshes, ({}, options), strict=True)
        ]
    (wanted_loss, wanted), (loss, grads) = jax.device_get(results)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(wanted))
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        assert np.abs(x - y).max() <= 1e-5 * largest


def test_one_all_gather_of_embeddings():
    mesh = zoo.make_mesh(data=8)
    step = eqx.filter_jit(zoo.value(contrastive_loss, mesh))
    text = step.lower(zoo.place(make(), mesh), zoo.place_batch(draw(), mesh)).as_text()
    assert text.count("stablehlo.all_gather") == 1


def test_logits_on_a_mesh_are_of_all_texts():
    mesh = zoo.make_mesh(data=4, tensor=2)
    model, batch = make(), draw()
    run = zoo.spmd(lambda model, batch: model(batch["tokens"], batch["images"]), mesh, out="batch classes")
    logits = run(zoo.place(model, mesh), zoo.place_batch(batch, mesh))
    np.testing.assert_allclose(logits, model(batch["tokens"], batch["images"]), rtol=1e-4, atol=1e-5)
    assert model(batch["tokens"][:3], batch["images"]).shape == (ROWS, 3)


def test_dropout_differs_between_the_towers_and_rows():
    model = make()
    for name in ("text", "image"):
        tower = getattr(model, name)
        noisy = dataclasses.replace(tower, dropout=zoo.layers.Dropout(0.5))
        model = dataclasses.replace(model, **{name: noisy})
    batch = draw()
    batch = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), batch)
    logits = model(batch["tokens"], batch["images"], key=jax.random.key(1))
    again = model(batch["tokens"], batch["images"], key=jax.random.split(jax.random.key(1), ROWS))
    assert len(np.unique(logits.round(5), axis=0)) == len(np.unique(logits.round(5), axis=1)) == ROWS
    np.testing.assert_array_equal(logits, again)


def with_images(count: int):
    return {**draw(), "images": draw(count)["images"]}


@pytest.mark.parametrize(
    ("run", "error", "message"),
    {
        "pairs": (lambda m: contrastive_loss(m, with_images(7)), ValueError, "has 8 texts and 7 images: expected the"),
        "one": (lambda m: contrastive_loss(m, draw(1)), ValueError, "one pair, and nothing to tell"),
        "key": (lambda m: contrastive_loss(m, {**draw(), "labels": 0}), ValueError, "has labels, which nothing"),
        "missing": (lambda m: contrastive_loss(m, {"images": 0}), ValueError, "has no tokens, only images"),
        "kind": (lambda m: contrastive_loss(m, draw(), kind="hinge"), ValueError, "kind='hinge': expected softmax or"),
        "tower": (lambda m: contrastive_loss(m.text, draw()), TypeError, "of TwoTowers, not of Encoder"),
        "both": (lambda m: zoo.embed(m, draw()["tokens"], images=draw()["images"]), ValueError, "texts or images"),
        "neither": (lambda m: zoo.embed(m), ValueError, "texts or images"),
        "pooling": (lambda m: zoo.embed(m, draw()["tokens"], pooling="mean"), ValueError, "poolers of their own"),
        "mask": (lambda m: zoo.embed(m, None, 1, images=draw()["images"]), ValueError, "mask is of tokens"),
        "text": (lambda m: zoo.embed(m.text, images=draw()["images"]), TypeError, "Encoder embeds tokens, and images"),
        "states": (
            lambda m: zoo.hidden_states(m, draw()["tokens"]),
            AttributeError,
            "model.text or model.image, which",
        ),
        "patch": (lambda m: zoo.patch(m, {}), TypeError, "TwoTowers takes no edits"),
        "patches": (
            lambda m: m.image(PatchedImages(jnp.ones((1, 4, 4)), jnp.ones((1, 4), bool), jnp.ones((1, 2), int))),
            TypeError,
            "got PatchedImages",
        ),
        "end": (lambda m: make(end_token=2), ValueError, "highest id of a text in CLIP's files"),
    }.values(),
)
def test_two_towers_refuse_natural_mistakes(no_type_checks, run, error, message):
    model = eqx.filter_eval_shape(make)
    with pytest.raises(error, match=message):
        eqx.filter_eval_shape(run, model)


def test_micro_batches_are_refused():
    mesh = zoo.make_mesh(data=2, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="microbatches=2: each would be compared with itself"):
        zoo.value_and_grad(contrastive_loss, mesh, microbatches=2)(zoo.place(make(), mesh), draw())


def test_a_sharded_sequence_is_refused():
    mesh = zoo.make_mesh(data=4, context=2)
    with pytest.raises(NotImplementedError, match="makes one vector of a row, and the mesh shards its tokens"):
        zoo.value(contrastive_loss, mesh)(zoo.place(make(), mesh), zoo.place_batch(draw(), mesh))


def test_images_of_one_size_are_refused_by_a_model_of_patches(no_type_checks):
    model = zoo.load(FIXTURES / "siglip2_pairs")
    with pytest.raises(TypeError, match=r"expected PatchedImages, got an array float32\[1, 3, 8, 8\]"):
        model.image(jnp.zeros((1, 3, 8, 8)))
    images = PatchedImages(jnp.zeros((1, 4, 48)), jnp.ones((1, 4), bool), jnp.full((1, 2), 2, jnp.int32))
    with pytest.raises(ValueError, match="masked patches need a mask token"):
        model.image(images, masked=jnp.zeros((1, 4), bool))


def test_padding_of_patches_changes_no_image():
    model = zoo.load(FIXTURES / "siglip2_pairs", dtype="float32")
    pixels = jax.random.normal(jax.random.key(0), (1, 6, 48))
    grid = jnp.array([[2, 3]], jnp.int32)
    plain = PatchedImages(pixels, jnp.ones((1, 6), bool), grid)
    longer = jnp.concatenate([pixels, jnp.full((1, 3, 48), 7.0)], axis=1)
    padded = PatchedImages(longer, jnp.arange(9)[None] < 6, grid)
    np.testing.assert_allclose(model.embed_images(padded), model.embed_images(plain), rtol=0, atol=1e-6)
    empty = PatchedImages(longer, jnp.arange(9)[None] < 6, jnp.zeros((1, 2), jnp.int32))
    assert np.isfinite(model.image.embedding(empty)).all()


@pytest.mark.parametrize("end", [None, 9])
def test_the_end_token_is_found_on_any_side_of_padding(end):
    pooler = EndTokenPooler(end)
    tokens = jnp.array([[3, 9, 9, 9], [9, 9, 3, 9], [3, 4, 5, 9]])
    real = jnp.array([[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]]) > 0
    x = jnp.arange(12.0).reshape(3, 4, 1)
    np.testing.assert_array_equal(pooler(x, pooler.find_end(tokens, real))[:, 0], [1, 7, 11])
    np.testing.assert_array_equal(pooler(x, pooler.find_end(tokens))[:, 0], [1, 4, 11])


def test_texts_without_a_mask_are_pooled_at_the_last_place():
    pooler = LastPlacePooler(4, 3, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 5, 4))
    np.testing.assert_array_equal(pooler(x), pooler.linear(x[:, -1]))
    with pytest.raises(ValueError, match="padding is read as text by this model: pad every text to one length"):
        pooler(x, jnp.ones((2, 5), bool))


def test_left_and_right_padding_give_one_embedding():
    model = zoo.load(FIXTURES / "clip_pairs", dtype="float32")
    text = np.array([[5, 7, 9, 39]])
    right, left = np.pad(text, [(0, 0), (0, 3)]), np.pad(text, [(0, 0), (3, 0)])
    text, right, left = map(jnp.asarray, (text, right, left))
    wanted = zoo.embed(model, text)
    np.testing.assert_allclose(zoo.embed(model, right, right > 0), wanted, atol=1e-6)
    np.testing.assert_allclose(zoo.embed(model, left, left > 0), wanted, atol=1e-6)
    np.testing.assert_allclose(zoo.embed(model, right), wanted, atol=1e-6)  # causal: padding comes later


def test_a_text_of_padding_only_is_nan():
    texts = jnp.array([[3, 0], [3, 0]])
    vectors = zoo.embed(make(), texts, np.array([[True, True], [False, False]]))
    np.testing.assert_array_equal(np.isnan(vectors).all(axis=1), [False, True])


def test_inputs_of_towers_are_named(no_type_checks):
    with pytest.raises(TypeError, match="tokens: expected .*, got list"):
        make()([[3, 0]], draw()["images"])
    with pytest.raises(TypeError, match="images: expected .*, got list"):
        zoo.embed(make(), images=[1])


def test_towers_on_a_mesh_are_saved(tmp_path):
    """Their scalars, too, which are replicated."""
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    model = zoo.load(FIXTURES / "siglip_pairs", mesh=mesh, dtype="bfloat16")
    zoo.save(model, tmp_path)
    for x, y in zip(jax.tree.leaves(zoo.load(tmp_path)), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(x, y)


def test_options_are_of_both_towers():
    model = zoo.configure(make(), remat="full", loop="plain", attention="reference")
    assert [tower.stack.remat for tower in (model.text, model.image)] == ["full", "full"]
    assert [tower.stack.loop for tower in (model.text, model.image)] == ["plain", "plain"]
    batch = draw()
    ours = zoo.embed(model, images=batch["images"])
    np.testing.assert_allclose(ours, zoo.embed(make(), images=batch["images"]), rtol=1e-4, atol=1e-6)


def test_one_tower_is_adapted_by_name():
    names = ("text.layers.*.attention.query", "image_projection")
    model = zoo.adapters.lora(make(), targets=names, rank=2, key=jax.random.key(0))
    paths = zoo.models.list_parameter_paths(model)
    adapted = {path.name.partition(".lora")[0] for path in paths if path.leaf.adapter_parameter}
    assert adapted == set(names)


def test_edits_of_a_tower_are_not_saved(tmp_path):
    model = make()
    edited = dataclasses.replace(model, text=zoo.patch(model.text, {"layers.0": lambda x: 2 * x}))
    with pytest.raises(ValueError, match=r"no place for edits, and the model has one of layers\.0"):
        zoo.save(edited, tmp_path)


def test_a_model_from_scratch_is_read_again(tmp_path):
    model = make()
    zoo.save(model, tmp_path)
    again = zoo.load(tmp_path)
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(x, y)
