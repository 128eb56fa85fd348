"""Pictures become the pixels of transformers with PIL; what is not known is refused by name.

The environment variable ZOO_PARITY names a folder with pictures, configs and pixels.
"""

import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
from safetensors.numpy import load_file

import zoo
from zoo.images import make_image_processor, preprocess_images
from zoo.layers.encoders.patches import PatchedImages

PARITY = Path(os.environ.get("ZOO_PARITY", "nowhere")) / "preprocess"
needs_parity = pytest.mark.skipif(not PARITY.exists(), reason="ZOO_PARITY names no folder")
RED = np.zeros((6, 4, 3), np.uint8) + np.array([255, 0, 0], np.uint8)
PLAIN = {
    "image_processor_type": "CLIPImageProcessor",
    "size": 4,
    "crop_size": 4,
    "image_mean": [0, 0, 0],
    "image_std": [1, 1, 1],
}


def open_pictures() -> list:
    pictures = []
    for path in sorted((PARITY / "images").glob("*.png")):
        with PIL.Image.open(path) as picture:
            picture.load()
            pictures.append(picture)
    return pictures


def compare(ours, expected: dict, prefix: str) -> None:
    wanted = expected[f"{prefix}.pixel_values"]
    pixels = ours
    if isinstance(ours, PatchedImages):
        np.testing.assert_array_equal(ours.mask, expected[f"{prefix}.pixel_attention_mask"] > 0)
        np.testing.assert_array_equal(ours.grids, expected[f"{prefix}.spatial_shapes"])
        pixels = ours.pixels
    assert pixels.shape == wanted.shape and pixels.dtype == np.float32
    np.testing.assert_allclose(pixels, wanted, rtol=0, atol=1e-5)


@needs_parity
@pytest.mark.parametrize("case", ["clip", "clip_odd_crop", "chinese_clip", "siglip", "siglip2"])
def test_pixels_are_those_of_transformers(case):
    expected = load_file(PARITY / case / "expected.safetensors")
    process = make_image_processor(PARITY / case)
    pictures = open_pictures()
    for number, picture in enumerate(pictures):
        compare(process([picture]), expected, str(number))
    together = process(pictures)
    if isinstance(together, PatchedImages):
        compare(together, expected, "batch")
    else:
        np.testing.assert_array_equal(together[:1], process(pictures[:1]))


def test_alpha_is_laid_over_white_and_gray_has_three_channels():
    clear = np.concatenate([RED, np.zeros((6, 4, 1), np.uint8)], axis=-1)
    half = np.concatenate([RED, np.full((6, 4, 1), 128, np.uint8)], axis=-1)
    palette = PIL.Image.fromarray(RED).convert("P")
    palette.info["transparency"] = palette.getpixel((0, 0))
    gray = np.full((6, 4), 51, np.uint8)
    pixels = preprocess_images([clear, half, palette, gray, gray[..., None]], PLAIN)
    assert pixels.shape == (5, 3, 4, 4)
    np.testing.assert_allclose(pixels[0], 1)
    np.testing.assert_allclose(pixels[1, :, 0, 0], [1, 127 / 255, 127 / 255], atol=1 / 255)
    np.testing.assert_allclose(pixels[2], 1)
    np.testing.assert_allclose(pixels[3:], 51 / 255, rtol=1e-6)


def test_a_small_picture_is_black_beyond_its_edge():
    config = {**PLAIN, "do_resize": False, "crop_size": {"height": 9, "width": 3}}
    (pixels,) = preprocess_images([np.full((6, 4, 3), 255, np.uint8)], config)
    assert pixels.shape == (3, 9, 3)
    np.testing.assert_array_equal(pixels[0, :, 0], [0, 0, *6 * [1], 0])


def test_steps_are_left_out_where_the_config_says_so():
    config = {**PLAIN, "do_resize": False, "do_center_crop": False, "do_rescale": False, "do_normalize": False}
    (pixels,) = preprocess_images([RED], config)
    np.testing.assert_array_equal(pixels, RED.transpose(2, 0, 1))


def test_patches_are_row_column_channel_with_padding_at_the_end():
    config = {
        "image_processor_type": "Siglip2ImageProcessor",
        "patch_size": 2,
        "max_num_patches": 7,
        "do_resize": False,
    }
    config |= {"do_normalize": False, "do_rescale": False}
    picture = np.arange(72, dtype=np.uint8).reshape(6, 4, 3)
    images = preprocess_images([picture], config)
    np.testing.assert_array_equal(images.grids, [[3, 2]])
    np.testing.assert_array_equal(images.mask, [[True] * 6 + [False]])
    np.testing.assert_array_equal(images.pixels[0, 3], picture[2:4, 2:4].reshape(-1))
    assert not np.asarray(images.pixels[0, 6]).any()
    with pytest.raises(ValueError, match="a picture has 6 patches, and max_num_patches = 5"):
        preprocess_images([picture], {**config, "max_num_patches": 5})


@pytest.mark.parametrize(
    ("config", "images", "error", "message"),
    {
        "unknown": (
            {"image_processor_type": "ViltImageProcessor"},
            [RED],
            ValueError,
            "= ViltImageProcessor, and known",
        ),
        "none": ({}, [RED], ValueError, "image_processor_type = None"),
        "step": ({**PLAIN, "do_pad": True}, [RED], ValueError, "do_pad of preprocessor_config.json is a step"),
        "size": ({**PLAIN, "size": {"longest_edge": 4}}, [RED], ValueError, "expected height and width, or shortest"),
        "sizes": ({**PLAIN, "do_center_crop": False}, [RED, RED[:4]], ValueError, "4 x 4 pixels and others"),
        "empty": (PLAIN, [], ValueError, "at least one picture"),
        "floats": (PLAIN, [RED / 255], TypeError, "gray levels from 0 to 255, uint8 .*, got an array float64"),
    }.values(),
)
def test_preprocessing_refuses_what_it_does_not_know(no_type_checks, config, images, error, message):
    with pytest.raises(error, match=message):
        preprocess_images(images, config)


def test_pictures_for_dinov2_are_made_as_for_clip():
    """transformers copies BiT's steps from CLIP's, and the defaults are the same."""
    for settings in ({}, {**PLAIN, "size": {"shortest_edge": 5}, "crop_size": {"height": 4, "width": 4}}):
        expected = preprocess_images([RED], {**settings, "image_processor_type": "CLIPImageProcessor"})
        found = preprocess_images([RED], {**settings, "image_processor_type": "BitImageProcessor"})
        np.testing.assert_array_equal(found, expected)


def test_the_processor_of_a_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no preprocessor_config.json, which says how"):
        make_image_processor(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": PLAIN}))
    newer = zoo.images.make_image_processor(tmp_path)([RED])
    older = {**PLAIN, "feature_extractor_type": "CLIPFeatureExtractor"}
    del older["image_processor_type"]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(older))
    np.testing.assert_array_equal(make_image_processor(tmp_path)([RED]), newer)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "ViTImageProcessorFast"}))
    with pytest.raises(ValueError, match="= ViTImageProcessorFast, and known are CLIPImageProcessor"):
        make_image_processor(tmp_path)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (RED, r"a list of pictures, got an array uint8\[6, 4, 3\]"),
        (PIL.Image.fromarray(RED), "a list of pictures, got Image"),
        ([np.zeros((3, 6, 5), np.uint8)], r"\"height width channels\", got an array uint8\[3, 6, 5\]"),
        ([PIL.Image.fromarray(np.zeros((6, 4), np.uint16))], "a picture of mode I;16"),
        ([PIL.Image.fromarray(np.zeros((6, 4), np.float32))], "a picture of mode F"),
    ],
)
def test_what_is_not_a_list_of_pictures_of_8_bits_is_refused(no_type_checks, images, message):
    with pytest.raises(TypeError, match=message):
        preprocess_images(images, PLAIN)


def test_arrays_of_jax_are_pictures():
    given = preprocess_images([jnp.asarray(RED)], PLAIN)
    np.testing.assert_array_equal(given, preprocess_images(RED[None], PLAIN))
