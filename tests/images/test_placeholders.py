"""Pictures of texts: tiles, packed patches and the tokens that stand for them are those of transformers.

The fixture holds one picture through each image processor, and texts with pictures through each whole processor. The
environment variable ZOO_PARITY names a folder with more pictures.
"""

import json
import math
import os
import re
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from einops import rearrange
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

import zoo
from zoo.images import (
    ProcessedImages,
    expand_placeholders,
    join_rows,
    measure_images,
    open_image,
    preprocess_images,
    read_picture_size,
)
from zoo.images.packed import fit_pixels, fit_tokens
from zoo.images.placeholders import FAMILIES
from zoo.layers.encoders.masked_images import MaskedImages
from zoo.layers.encoders.packed_images import PackedImages

FIXTURE = Path(__file__).parents[1] / "fixtures" / "images"
PARITY = Path(os.environ.get("ZOO_PARITY", "nowhere")) / "preprocess"
needs_parity = pytest.mark.skipif(not PARITY.exists(), reason="ZOO_PARITY names no folder")
CONFIGS = json.loads((FIXTURE / "configs.json").read_text())
RUNS = json.loads((FIXTURE / "placeholders.json").read_text())
PLAIN = {"do_resize": False, "do_rescale": False, "do_normalize": False}
PALIGEMMA = {
    "image_processor_type": "SiglipImageProcessor",
    "processor_class": "PaliGemmaProcessor",
    "size": {"height": 32, "width": 32},
    "image_seq_length": 4,
    "bos_token": {"content": "<s>"},
}
FACTS = {
    "llava": {"patch_size": 4, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    "gemma3": {"image_seq_length": 4},
    "gemma4": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
    "mistral3": {"spatial_merge_size": 2},
    "idefics3": {"image_seq_len": 4},
    "smolvlm": {"image_seq_len": 4},
    "internvl": {"image_seq_length": 4},
}
SMALLEST = {"qwen2_5_vl": "qwen2_vl", "mistral3": "pixtral"}


def compare(ours: ProcessedImages, expected: dict, config: dict) -> None:
    """Compare the result of one picture with all keys of transformers."""
    wanted = dict(expected)
    pixels = wanted.pop("pixel_values")
    mask = wanted.pop("pixel_attention_mask", None)
    got = ours.pixels
    (shape,) = ours.shapes
    if ours.grids is not None:
        _, rows, columns = ours.grids[0]
        patch = config["patch_size"]
    if "image_position_ids" in wanted:
        places = np.stack([np.tile(np.arange(columns), rows), np.repeat(np.arange(rows), columns)], axis=-1)
        padding = ((0, pixels.shape[1] - len(got)), (0, 0))
        padded = np.pad(places, padding, constant_values=-1)
        np.testing.assert_array_equal(wanted.pop("image_position_ids"), padded[None])
        assert wanted.pop("num_soft_tokens_per_image") == shape.prod()
        got = np.pad(got, padding)[None]
    elif "image_sizes" in wanted:
        height, width = patch["height"], patch["width"]
        np.testing.assert_array_equal(wanted.pop("image_sizes"), [[rows * height, columns * width]])
        got = rearrange(got, "(y x) (c h w) -> 1 c (y h) (x w)", y=rows, h=height, w=width)
    elif "image_grid_thw" in wanted:
        np.testing.assert_array_equal(wanted.pop("image_grid_thw"), ours.grids)
        np.testing.assert_array_equal(shape * config["merge_size"], ours.grids[0, 1:])
    elif mask is not None:
        np.testing.assert_array_equal(ours.mask, mask[0] > 0)
        np.testing.assert_array_equal(shape, [np.sum(wanted.pop(key, 0)) for key in ("rows", "cols")])
        got = got[None]
    else:
        assert wanted.pop("num_crops", shape.prod()) == shape.prod()
        assert wanted.pop("num_patches", len(got)) == len(got) == shape.prod() + 1
    assert not wanted, f"not compared: {', '.join(wanted)}"
    assert got.shape == pixels.shape and got.dtype == np.float32
    np.testing.assert_allclose(got, pixels, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CONFIGS)
def test_the_fixture_is_processed_as_in_transformers(case):
    with np.load(FIXTURE / "expected.npz") as arrays:
        expected = {key.split(".")[1]: arrays[key] for key in arrays if key.startswith(f"{case}.")}
    compare(preprocess_images([FIXTURE / "1.png"], CONFIGS[case]), expected, CONFIGS[case])


@needs_parity
@pytest.mark.parametrize("case", CONFIGS)
def test_each_picture_is_processed_as_in_transformers(case):
    config = json.loads((PARITY / case / "preprocessor_config.json").read_text())
    everything = load_file(PARITY / case / "expected.safetensors")
    process = zoo.images.make_image_processor(PARITY / case)
    for number in range(4):
        expected = {key[2:]: x for key, x in everything.items() if key.startswith(f"{number}.")}
        compare(process([PARITY / f"images/{number}.png"]), expected, config)


@needs_parity
@pytest.mark.parametrize("case", ["idefics3", "idefics3_whole", "smolvlm"])
def test_rows_of_tiles_are_padded_as_in_transformers(case):
    expected = load_file(PARITY / case / "expected.safetensors")
    texts = [[0, 1], [2]]
    rows = [preprocess_images([PARITY / f"images/{n}.png" for n in numbers], CONFIGS[case]) for numbers in texts]
    images = join_rows(rows)
    assert isinstance(images, MaskedImages)
    np.testing.assert_array_equal(images.mask, expected["batch.pixel_attention_mask"] > 0)
    np.testing.assert_allclose(images.pixels, expected["batch.pixel_values"], rtol=0, atol=1e-5)


def process_for(case: str, sizes: list) -> tuple[ProcessedImages, dict]:
    model_type = case.removesuffix("_pan_and_scan").removesuffix("_whole").removesuffix("_suffix")
    config = PALIGEMMA if model_type == "paligemma" else CONFIGS[SMALLEST.get(case, case)]
    config = {**config, **FACTS.get(model_type, {}), "model_type": model_type}
    return preprocess_images([np.zeros((height, width, 3), np.uint8) for width, height in sizes], config), config


def split_tokens(text: str) -> list[str]:
    return re.findall(r"<[^>]+>|\[[A-Z_]+\]|\n\n|\n|[^\s<\[]+", text)


@pytest.mark.parametrize("case", RUNS)
def test_texts_have_the_tokens_of_transformers(case):
    expected = RUNS[case]
    images, config = process_for(case, expected["images"])
    tokens = split_tokens(expand_placeholders(expected["text"], images, config))
    suffix = expected["options"].get("suffix")
    answer = split_tokens(f"{suffix}</s>") if suffix else []
    wanted = [token for token, count in expected["runs"] for _ in range(count)]
    assert len(tokens) + len(answer) == len(wanted) == expected["count"]
    for ours, theirs in zip(tokens + answer, wanted, strict=True):
        assert ours == theirs or theirs == "<unk>"
    image_token = FAMILIES[config["model_type"]].words.get("image_token")
    marks = [int(token == config.get("image_token", image_token)) for token in tokens]
    if "mm_token_type_ids" in expected:
        assert expected["mm_token_type_ids"] == "".join(map(str, marks))
    elif "token_type_ids" in expected and config["model_type"] == "gemma3":
        assert expected["token_type_ids"] == "".join(map(str, marks))
    elif "token_type_ids" in expected:
        assert expected["token_type_ids"] == "0" * len(tokens) + "1" * len(answer)


def test_the_text_about_crops_of_gemma_has_its_blanks():
    images, config = process_for("gemma3_pan_and_scan", [[61, 47]])
    one = "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"
    before = f"Here is the original image {one} and here are some crops to help you see better {one} {one}"
    assert expand_placeholders("<start_of_image>?", images, {**config, "image_seq_length": 1}) == f"{before}?"


@pytest.mark.parametrize(("side", "tiles"), [(64, [2, 2]), (45, [0, 0]), (46, [2, 2])])
def test_equally_near_grids_are_chosen_by_the_size_of_a_picture(side, tiles):
    images = preprocess_images([np.zeros((side, side, 3), np.uint8)], CONFIGS["internvl"])
    assert images.shapes.tolist() == [tiles]


def test_packed_rows_hold_the_patches_of_their_pictures():
    config = CONFIGS["qwen2_vl"]
    picture = np.random.default_rng(0).integers(0, 256, (40, 24, 3), np.uint8)
    two = preprocess_images([picture, picture[:16]], config)
    one = preprocess_images([picture[:16]], config)
    images = join_rows([one, None, two])
    assert isinstance(images, PackedImages)
    np.testing.assert_array_equal(images.grids, [[[1, 4, 6], [0] * 3], [[0] * 3] * 2, [[1, 10, 6], [1, 4, 6]]])
    np.testing.assert_array_equal(images.count_patches().sum(1), [24, 0, 84])
    np.testing.assert_array_equal(images.pixels[0, :24], one.pixels)
    np.testing.assert_array_equal(images.pixels[2, 60:], one.pixels)
    assert not np.asarray(images.pixels[0, 24:]).any() and not np.asarray(images.pixels[1]).any()


def test_rows_of_one_size_are_padded_with_zero_images():
    config = CONFIGS["llava"]
    row = preprocess_images([np.full((9, 9, 3), 7, np.uint8)], config)
    images = join_rows([None, row])
    assert images.shape == (2, 1, 3, 32, 32)
    np.testing.assert_array_equal(images[1], row.pixels)
    assert not np.asarray(images[0]).any()


def test_rows_that_do_not_belong_together_are_refused():
    row = preprocess_images([FIXTURE / "1.png"], CONFIGS["llava"])
    with pytest.raises(ValueError, match="a batch of texts only needs no images"):
        join_rows([None, None])
    with pytest.raises(ValueError, match=r"shapes \(3, 32, 32\) and \(96,\): expected one image processor"):
        join_rows([row, preprocess_images([FIXTURE / "1.png"], CONFIGS["qwen2_vl"])])


@given(st.integers(1, 700), st.integers(1, 700), st.integers(1, 40))
def test_sides_are_whole_units_within_the_limits(height, width, unit):
    least = 4 * unit**2
    most = 5000 * unit**2
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match="is longer than 200 times its width: crop or resize it"):
            fit_pixels((height, width), unit, least, most)
        return
    sides = fit_pixels((height, width), unit, least, most)
    assert all(side % unit == 0 and side > 0 for side in sides)
    assert least <= math.prod(sides) <= most


@given(st.integers(1, 9000), st.integers(1, 9000), st.sampled_from([70, 280]))
def test_tokens_are_at_most_the_limit_and_nearly_so(height, width, most):
    sides = fit_tokens((height, width), 6, most)
    rows, columns = (side // 6 for side in sides)
    assert rows * columns <= most and min(rows, columns) >= 1
    if min(rows, columns) > 1:
        assert (rows + 1) * (columns + 1) > most


def test_a_short_side_becomes_one_token():
    assert fit_pixels((10, 1000), 8, 64, 640) == (8, 248)
    assert fit_pixels((400, 2), 8, 64, 640) == (120, 8)
    assert fit_tokens((2, 6000), 6, 70) == (6, 6 * 70)
    assert fit_tokens((90, 1), 6, 70) == (6 * 70, 6)
    assert fit_tokens((72, 1), 6, 70) == (6 * 70, 6)
    assert fit_tokens((1, 71), 6, 70) == (6, 6 * 70)


@pytest.mark.parametrize("shape", [(64, 96), (96, 32), (32, 64)])
def test_tiles_cover_their_picture(shape):
    picture = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    images = preprocess_images([picture], {**CONFIGS["idefics3"], **PLAIN})
    rows, columns = images.shapes[0]
    assert (rows * 32, columns * 32) == shape
    whole = rearrange(images.pixels[:-1], "(y x) c h w -> (y h) (x w) c", y=rows)
    np.testing.assert_array_equal(whole, picture)
    crops = preprocess_images([picture], {**CONFIGS["gemma3_pan_and_scan"], "do_normalize": False, "do_rescale": False})
    assert crops.shapes.tolist() == [[max(1, shape[0] // shape[1]), max(1, round(shape[1] / shape[0] + 0.01))]]
    corner = preprocess_images(
        [picture[: math.ceil(shape[0] / crops.shapes[0, 0]), : math.ceil(shape[1] / crops.shapes[0, 1])]],
        {**CONFIGS["gemma3"], "do_normalize": False, "do_rescale": False},
    )
    np.testing.assert_array_equal(crops.pixels[1], corner.pixels[0])


def test_patches_of_a_token_are_neighbors_in_qwen():
    picture = np.arange(16 * 24, dtype=np.uint16).reshape(16, 24).astype(np.uint8)
    images = preprocess_images([picture], {**CONFIGS["qwen2_vl"], **PLAIN})
    flat = images.pixels.reshape(24, 3, 2, 4, 4)
    np.testing.assert_array_equal(flat[1, 0, 0], picture[:4, 4:8])
    np.testing.assert_array_equal(flat[2, 2, 1], picture[4:8, :4])
    np.testing.assert_array_equal(flat[4, 0, 0], picture[:4, 8:12])


def test_older_limits_of_qwen_have_the_last_word():
    config = {**CONFIGS["qwen2_vl"], "min_pixels": 4096, "max_pixels": 4096}
    images = preprocess_images([np.zeros((16, 16, 3), np.uint8)], config)
    np.testing.assert_array_equal(images.grids, [[1, 16, 16]])


@pytest.mark.parametrize(
    ("case", "changes", "shape", "message"),
    [
        (
            "qwen2_vl",
            {"size": {"longest_edge": 9}},
            (9, 9),
            "expected shortest_edge and longest_edge, the least and most",
        ),
        ("qwen2_vl", {}, (1, 201), "1 x 201 pixels is longer than 200 times its width"),
        ("qwen2_vl", {"do_resize": False}, (8, 12), "has 8 x 12 pixels, and a token 8 x 8: do_resize makes multiples"),
        ("qwen2_vl", {"do_center_crop": True}, (9, 9), "do_center_crop of preprocessor_config.json is a step"),
        ("pixtral", {"size": {"shortest_edge": 9}}, (9, 9), "size = {'shortest_edge': 9}: expected longest_edge"),
        ("pixtral", {}, (1, 999), "a picture of 1 x 999 pixels would become 0 x 48: crop its longer edge"),
        ("gemma4", {"max_soft_tokens": 99}, (9, 9), "max_soft_tokens = 99: expected one of 70, 140, 280"),
        ("idefics3", {"size": {"longest_edge": 5000}}, (9, 9), "5000}: expected at most 4096"),
        ("idefics3", {"max_image_size": {"height": 9, "width": 9}}, (9, 9), "max_image_size = .*: expected longest"),
        ("internvl", {"do_pad": True}, (9, 9), "do_pad of preprocessor_config.json is a step that is not known"),
        (
            "llava",
            {"do_center_crop": False, "size": 8},
            (9, 18),
            "pictures become 8 x 16 pixels and 8 x 8: a batch has",
        ),
        ("llava", {}, (0, 9), "a picture has 0 x 9 pixels: expected at least 1 x 1"),
    ],
)
def test_settings_and_pictures_beyond_them_are_refused(case, changes, shape, message):
    pictures = [np.zeros((9, 9, 3), np.uint8), np.zeros((*shape, 3), np.uint8)]
    if case != "llava":
        pictures.reverse()
    with pytest.raises(ValueError, match=message):
        preprocess_images(pictures, {**CONFIGS[case], **changes})


def test_texts_have_a_placeholder_for_each_picture():
    images, config = process_for("llava", [[9, 9]])
    with pytest.raises(ValueError, match="has 2 placeholders <image> and there are 1 pictures: expected one for each"):
        expand_placeholders("<image> or <image>", images, config)
    with pytest.raises(ValueError, match="model_type = bert of the config: expected one of llava, paligemma"):
        expand_placeholders("<image>", images, {**config, "model_type": "bert"})
    with pytest.raises(ValueError, match="model_type = qwen2_vl reads other images: process them with its own config"):
        expand_placeholders("<|image_pad|>", images, {**config, "model_type": "qwen2_vl"})
    with pytest.raises(ValueError, match="has no image_seq_length and no patch_size: processor_config"):
        expand_placeholders("<image>", images, {"model_type": "llava"})


def test_files_that_are_not_whole_images_are_refused(tmp_path, monkeypatch):
    data = (FIXTURE / "1.png").read_bytes()
    (tmp_path / "notes.png").write_text("not a picture")
    (tmp_path / "short.png").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="notes.png is not an image: expected a file that Pillow opens"):
        open_image(tmp_path / "notes.png")
    with pytest.raises(ValueError, match=r"short.png is cut off or damaged \(.*\): expected a whole image"):
        open_image(str(tmp_path / "short.png"))
    with (
        pytest.raises(ValueError, match=r"short.png is cut off or damaged"),
        PIL.Image.open(tmp_path / "short.png") as x,
    ):
        open_image(x)
    with pytest.raises(ValueError, match="a picture is cut off or damaged"):
        open_image(data[:99])
    with monkeypatch.context() as patched:
        patched.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 9)
        for read in (open_image, read_picture_size):
            with pytest.raises(ValueError, match=r"1.png is too large \(.*\): expected a smaller picture"):
                read(FIXTURE / "1.png")
    with pytest.raises(FileNotFoundError):
        open_image(tmp_path / "none.png")
    with pytest.raises(TypeError, match="expected PIL images, arrays, paths or bytes, got "):
        open_image(3)
    with pytest.raises(TypeError, match="expected a list of pictures, got"):
        preprocess_images("cat.png", CONFIGS["llava"])


def test_files_and_bytes_are_upright_pictures(tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, (6, 4, 3), np.uint8)
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    PIL.Image.fromarray(picture).save(tmp_path / "turned.png", exif=exif)
    opened = open_image(tmp_path / "turned.png")
    np.testing.assert_array_equal(opened, np.rot90(picture, -1))
    np.testing.assert_array_equal(open_image((tmp_path / "turned.png").read_bytes()), opened)


def test_the_config_of_a_directory_has_the_facts_of_all_files(tmp_path):
    def write(name: str, content: dict) -> None:
        (tmp_path / name).write_text(json.dumps(content))

    write("preprocessor_config.json", {**CONFIGS["pixtral"], "processor_class": "PixtralProcessor"})
    write("processor_config.json", {"patch_size": 2, "spatial_merge_size": 2, "image_token": None})
    write("tokenizer_config.json", {"extra_special_tokens": {"image_token": "[PIC]"}, "bos_token": "<s>"})
    write("config.json", {"model_type": "mistral3"})
    config = zoo.images.read_image_config(tmp_path)
    images = zoo.images.make_image_processor(tmp_path)([np.zeros((8, 16, 3), np.uint8)])
    np.testing.assert_array_equal(images.grids, [[1, 4, 8]])
    assert expand_placeholders("a [PIC] b", images, config) == f"a {4 * '[PIC]'}[IMG_BREAK]{4 * '[PIC]'}[IMG_END] b"
    assert config["bos_token"] == "<s>"
    write("preprocessor_config.json", {**CONFIGS["internvl_whole"], "processor_class": "InternVLProcessor"})
    assert zoo.images.read_image_config(tmp_path)["crop_to_patches"] is True


@pytest.mark.parametrize("case", CONFIGS)
@given(data=st.data())
def test_shapes_follow_from_the_sizes_of_pictures(case, data):
    """For the settings of all processors, with the same errors."""
    side = st.integers(1, 130)
    sizes = data.draw(st.lists(st.tuples(side, side), min_size=1, max_size=3))
    config = {**CONFIGS[case], "do_resize": data.draw(st.booleans())}
    if case in ("llava", "llava_pad"):
        config["do_center_crop"] = data.draw(st.booleans())
    pictures = [np.zeros((*size, 3), np.uint8) for size in sizes]
    try:
        processed = preprocess_images(pictures, config)
    except ValueError as error:
        if "all input array" in str(error):  # crops of several sizes
            return
        with pytest.raises(ValueError) as raised:
            measure_images(sizes, config)
        assert str(raised.value) == str(error)
        return
    measured = measure_images(sizes, config)
    assert measured.pixels.shape == processed.pixels.shape and measured.pixels.dtype == processed.pixels.dtype
    assert measured.pixels.strides == (0,) * processed.pixels.ndim
    np.testing.assert_array_equal(measured.shapes, processed.shapes)
    assert (measured.grids is None) == (processed.grids is None) and (measured.mask is None) == (processed.mask is None)
    if processed.grids is not None:
        np.testing.assert_array_equal(measured.grids, processed.grids)
    if processed.mask is not None:
        np.testing.assert_array_equal(measured.mask, processed.mask)


def test_only_the_header_of_a_picture_is_read_for_its_size(tmp_path):
    picture = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 40, 3), np.uint8))
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    for suffix in ("png", "jpg", "webp", "gif", "bmp", "tiff"):
        path = tmp_path / f"a.{suffix}"
        picture.save(path)
        assert read_picture_size(path) == read_picture_size(path.read_bytes()) == (60, 40)
    for suffix in ("png", "jpg", "webp"):
        path = tmp_path / f"turned.{suffix}"
        picture.save(path, exif=exif)
        assert read_picture_size(path) == open_image(path).shape[:2] == (40, 60)
    content = (tmp_path / "turned.png").read_bytes()
    (tmp_path / "short.png").write_bytes(content[: len(content) // 2])
    assert read_picture_size(tmp_path / "short.png") == (40, 60)
    (tmp_path / "notes.png").write_text("not a picture")
    (tmp_path / "begin.png").write_bytes(content[:20])
    for name in ("notes.png", "begin.png"):
        with pytest.raises(ValueError, match=f"{name} "):
            read_picture_size(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_picture_size(tmp_path / "none.png")


def test_processors_of_pictures_without_texts_measure_nothing():
    with pytest.raises(ValueError, match="CLIPImageProcessor makes images without a text: processor_class of"):
        measure_images([(9, 9)], {"image_processor_type": "CLIPImageProcessor"})
