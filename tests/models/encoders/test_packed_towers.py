"""Encoders of packed images and their projectors: equal to transformers, to each row and image alone, whatever the
padding; gradients; one compilation for all grids; what they refuse."""

import dataclasses
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.models.encoders.packed_cases import join_rows, load_case, pad, select_rows
from zoo.layers.encoders.mergers import DeepstackMerger
from zoo.layers.encoders.packed_images import PackedImages
from zoo.models.hf.config import read_config
from zoo.models.hf.errors import ConfigError
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.families.gemma4_vision import GEMMA4_VISION
from zoo.models.hf.families.pixtral_vision import PIXTRAL_VISION
from zoo.models.hf.families.qwen2_5_vl_vision import QWEN2_5_VL_VISION
from zoo.models.hf.families.qwen2_vl_vision import QWEN2_VL_VISION
from zoo.models.hf.families.qwen3_5_vision import QWEN3_5_VISION
from zoo.models.hf.families.qwen3_vl_vision import QWEN3_VL_VISION
from zoo.parallel import gather

CASES = [
    "qwen2_vl_image",
    "qwen2_5_vl_image",
    "qwen2_5_vl_video",
    "qwen3_vl_image",
    "qwen3_5_image",
    "mistral3_image",
    "gemma4_image",
]
TOLERANCE = 1e-5


@eqx.filter_jit
def run(pair, images):
    """Return the features, with DeepStack's after the others, and the raw output of each layer."""

    def forward(tower, images):
        info = tower.token_info(images)
        return tower.embed(images, info).x, tower.hidden(images, info)

    (first, hidden), layers = zoo.capture(forward, "layers.*")(pair.tower, images)
    features = [pair.projector(hidden.x, images)]
    if isinstance(pair.projector, DeepstackMerger):
        features += pair.projector.merge_kept(hidden.kept, images)
    return jnp.stack(features), [first, *layers["layers.*"]]


def count_tokens(pair, images):
    return images.count_patches().sum(1) // pair.projector.merge**2


def compare(ours, wanted):
    assert ours.shape == wanted.shape
    assert np.abs(ours - wanted).max() <= TOLERANCE * np.abs(wanted).max()


@pytest.mark.parametrize("name", CASES)
def test_features_and_layers_equal_transformers(name):
    pair, images, expected = load_case(name)
    features, layers = run(pair, images)
    kind = "video_features" if "video_features" in expected else "image_features"
    wanted = [expected[kind], *(x for name, x in sorted(expected.items()) if name.startswith("deepstack_features"))]
    for x, y in zip(features, wanted, strict=True):
        compare(join_rows(x, count_tokens(pair, images)), y)
    for number, x in enumerate(layers):
        wanted = expected[f"vision_hidden_states.{number}"]
        compare(join_rows(x, images.count_patches().sum(1)), wanted.reshape(-1, wanted.shape[-1]))
    assert f"vision_hidden_states.{len(layers)}" not in expected


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_itself_in_any_batch_and_with_any_padding(name):
    pair, images, _ = load_case(name)
    features, _ = run(pair, images)
    counts = count_tokens(pair, images)
    assert counts[2] == 0 < min(counts[:2])
    for row in range(2):
        alone = pad(select_rows(images, row), 16)
        length = images.pixels.shape[1] + 16
        ours, _ = run(pair, alone)
        assert ours.shape[2] == length // pair.projector.merge**2 and np.isfinite(ours).all()
        compare(np.asarray(ours[:, 0, : counts[row]]), np.asarray(features[:, row, : counts[row]]))


def merge_all(model, images):
    """Return the features of a pair, and the sum of DeepStack's."""
    hidden = model.tower.hidden(images, model.tower.token_info(images))
    features = gather(model.projector)(hidden.x, images)
    if isinstance(model.projector, DeepstackMerger):
        features += sum(gather(model.projector).merge_kept(hidden.kept, images))
    return features


@eqx.filter_jit
def find_gradient(pair, images, counts):
    """Return the gradient of a sum over the tokens of images, for parameters and pixels."""

    def total(inputs):
        pair, images = inputs
        features = merge_all(pair, images)
        real = jnp.arange(features.shape[1]) < counts[:, None]
        return jnp.sin(3 * features).sum(-1, where=real[..., None]).sum()

    return eqx.filter_grad(total)((pair, images))


@pytest.mark.parametrize("name", CASES)
def test_gradients_do_not_depend_on_padding(name):
    pair, images, _ = load_case(name)
    counts = count_tokens(pair, images)
    wanted, wanted_pixels = find_gradient(pair, images, counts)
    ours, pixels = find_gradient(pair, pad(images, 16), counts)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        assert np.abs(x - y).max() <= TOLERANCE * max(np.abs(y).max(), 1)
    real = (images.find_images() > 0)[..., None]
    length = real.shape[1]
    assert not np.any(np.where(real, 0, wanted_pixels.pixels)) and not np.any(pixels.pixels[:, length:])
    assert np.all(np.abs(wanted_pixels.pixels).max(-1)[real[..., 0]] > 0)


def test_one_program_reads_all_grids():
    pair, images, _ = load_case("qwen2_5_vl_image")
    traces = []

    @eqx.filter_jit
    def forward(pair, images):
        traces.append(images)
        return pair.projector(pair.tower(images).last_hidden_state, images)

    first = forward(pair, images)
    turned = PackedImages(images.pixels, images.grids[..., jnp.array([0, 2, 1])])
    assert len(traces) == 1 and np.abs(forward(pair, turned) - first).max() > 1e-3
    assert len(traces) == 1


def find_errors(family, **keys):
    with pytest.raises(ConfigError) as caught:
        family.build(read_config(family, keys), key=jax.random.key(0))
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    {
        "rope": (QWEN2_VL_VISION, {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "QWEN is 'axial'"),
        "causal": (QWEN2_VL_VISION, {"is_causal": True}, "is_causal = True would change the result"),
        "heads": (QWEN2_VL_VISION, {"embed_dim": 36, "num_heads": 6}, "heads of 6 features: pairs of them turn"),
        "patch": (QWEN2_VL_VISION, {"patch_size": [14, 14]}, "patch_size = .* should be a whole number above 0"),
        "window": (QWEN2_5_VL_VISION, {"window_size": 20}, "window_size = 20 pixels is smaller than a block of 2 x 2"),
        "square": (QWEN3_VL_VISION, {"num_position_embeddings": 15}, "= 15: positions are learned on a square"),
        "order": (QWEN3_VL_VISION, {"deepstack_visual_indexes": [2, 1]}, r"= \[2, 1\] should be numbers of the 27 lay"),
        "absent": (QWEN3_VL_VISION, {"deepstack_visual_indexes": [27]}, r"= \[27\] should be numbers of the 27 layers"),
        "deepstack": (QWEN3_5_VISION, {"deepstack_visual_indexes": [1]}, r"= \[1\] would change the result"),
        "head_dim": (PIXTRAL_VISION, {"head_dim": 32}, "head_dim = 32, and it is hidden_size = 1024 over 16 heads"),
        "clipped": (GEMMA4_VISION, {"use_clipped_linears": True}, "use_clipped_linears = True would change the result"),
        "standardize": (GEMMA4_VISION, {"standardize": True}, "standardize = True would change the result"),
        "unknown": (QWEN2_5_VL_VISION, {"embed_dim": 32}, "embed_dim = 32 is not a key"),
    }.values(),
)
def test_configs_that_mean_something_else_are_refused(family, keys, message):
    assert re.search(message.replace("QWEN", family.name), find_errors(family, **keys))


def test_axial_rope_is_not_of_texts():
    message = find_errors(FAMILIES["llama"], rope_parameters={"rope_type": "axial", "rope_theta": 10000.0})
    assert message == "rope_type = 'axial', and RoPE of llama is 'default'"


def test_images_of_another_kind_are_refused():
    pair, images, _ = load_case("qwen2_5_vl_image")
    with pytest.raises(TypeError, match=r"expected PackedImages, got an array float32\[3, 36, 96\]"):
        pair.tower(images.pixels)
    with pytest.raises(ValueError, match="need a mask token"):
        pair.tower(images, masked=images.find_images() > 0)
    info = pair.tower.token_info(images)
    with pytest.raises(ValueError, match=r"none in TokenInfo\.windows"):
        pair.tower.hidden(images, dataclasses.replace(info, windows=None))


@pytest.mark.parametrize("loop", ["plain", "scan"])
def test_kept_layers_are_those_of_any_loop(loop):
    keys = {"depth": 7, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "num_position_embeddings": 4}
    config = read_config(QWEN3_VL_VISION, {**keys, "patch_size": 1, "deepstack_visual_indexes": [1, 3, 5]})
    model = zoo.configure(QWEN3_VL_VISION.build(config, key=jax.random.key(0)), loop=loop)
    images = PackedImages(jax.random.normal(jax.random.key(1), (1, 12, 6)), jnp.array([[[1, 2, 4], [1, 2, 2]]]))

    def forward(model, images):
        return model.hidden(images, model.token_info(images))

    names = [f"layers.{number}" for number in (1, 3, 5)]
    hidden = eqx.filter_jit(forward)(model, images)
    _, layers = eqx.filter_jit(zoo.capture(forward, *names))(model, images)
    for x, name in zip(hidden.kept, names, strict=True):
        np.testing.assert_allclose(x, layers[name], rtol=1e-5, atol=1e-6)


MESHES = {
    "axes": {"data": 2, "fsdp": 2, "tensor": 2},
    "sequence": {"data": 4, "tensor": 2, "layout": zoo.parallel.SEQUENCE},
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["qwen2_5_vl_image", "qwen3_vl_image", "mistral3_image", "gemma4_image"])
@pytest.mark.parametrize("mesh", MESHES)
def test_meshes_equal_one_device(name, mesh):
    pair, images, _ = load_case(name)
    rows = jnp.array([0, 1, 2, 1])
    batch = PackedImages(images.pixels[rows], images.grids[rows])

    def loss_fn(model, batch):
        features = merge_all(model, batch)
        real = jnp.arange(features.shape[1]) < (batch.count_patches().sum(1) // 4)[:, None]
        return jnp.sin(3 * features).sum(-1, where=real[..., None]).sum(), real.sum()

    results = []
    for on_mesh in (zoo.make_mesh(devices=jax.devices()[:1]), zoo.make_mesh(**MESHES[mesh])):
        run = zoo.value_and_grad(loss_fn, on_mesh)
        results.append(run(zoo.place(pair, on_mesh), zoo.place_batch(batch, on_mesh)))
    (wanted_loss, wanted), (loss, grads) = jax.device_get(results)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(wanted))
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        assert np.abs(x - y).max() <= 1e-5 * largest
