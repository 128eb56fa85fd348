"""From pictures to pixels by a checkpoint's preprocessor_config.json: resize, crop, normalize, cut into tiles or
patches.

Each processor is a function of one picture and its settings.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from zoo._checks import describe_argument
from zoo.layers.encoders.patches import Images, PatchedImages

from .packed import GEMMA4, PIXTRAL, QWEN
from .pictures import RGB, Picture, Pixels, normalize_pixels, open_image, process_whole, resize_picture
from .processed import Measured, ProcessedImages, join_masked_tiles, join_measured, join_patches, join_tiles
from .tiles import (
    measure_gemma3,
    measure_idefics3,
    measure_internvl,
    measure_llava,
    process_gemma3,
    process_idefics3,
    process_internvl,
    process_llava,
)

PREPROCESSOR_FILE = "preprocessor_config.json"
_PROCESSOR_FILE = "processor_config.json"
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_CLIP_COLORS = {"image_mean": _CLIP_MEAN, "image_std": _CLIP_STD, "resample": 3}
_HALF_COLORS = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5), "resample": 2}
_SQUARE = {"size": {"height": 224, "width": 224}}
_CLIP = {
    **_CLIP_COLORS,
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
    "do_center_crop": True,
}
_SIGLIP = {**_HALF_COLORS, **_SQUARE, "do_center_crop": False, "resample": 3}
_NAFLEX = {**_HALF_COLORS, "patch_size": 16, "max_num_patches": 256}
_GEMMA3 = {
    **_HALF_COLORS,
    **_SQUARE,
    "do_pan_and_scan": False,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
_GEMMA4 = {
    "image_mean": (0.0, 0.0, 0.0),
    "image_std": (1.0, 1.0, 1.0),
    "do_normalize": False,
    "resample": 3,
    "patch_size": 16,
    "max_soft_tokens": 280,
    "pooling_kernel_size": 3,
}
_IDEFICS3 = {
    **_HALF_COLORS,
    "size": {"longest_edge": 4 * 364},
    "max_image_size": {"longest_edge": 364},
    "do_image_splitting": True,
    "do_pad": True,
    "resample": 1,
}
_TILES = {"size": {"height": 384, "width": 384}, "crop_to_patches": False, "min_patches": 1, "max_patches": 12}
_PATCHES = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
_QWEN = {**_CLIP_COLORS, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}, **_PATCHES}
_PIXTRAL = {**_CLIP_COLORS, "size": {"longest_edge": 1024}, "patch_size": 16, "do_pad": True}
_COMMON = {
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
}
_IN_TEXTS = ("LlavaProcessor", "PaliGemmaProcessor")
"""Processors that put the pictures of CLIP's and SigLIP's image processors into texts."""


class _Processor(NamedTuple):
    """The image processor of a class in transformers."""

    defaults: Mapping[str, Any]
    process: Callable[[RGB, Mapping[str, Any]], Any]
    join: Callable[[list], Any]
    """From the results of all pictures to a batch."""
    measure: Callable[[tuple[int, int], Mapping[str, Any]], Measured] | None = None
    """From the size of a picture to the shapes of its result, for pictures in texts."""


def make_image_processor(directory: str | Path) -> Callable[[Sequence[Picture]], Any]:
    """Return the function from pictures to pixels of a checkpoint's directory: `preprocess_images` with its config.

        process = zoo.images.make_image_processor(directory)
        vectors = zoo.embed(model, images=process([PIL.Image.open("cat.png")]))

    **Raises** `FileNotFoundError` for a directory without preprocessor_config.json or processor_config.json, and
    `ValueError` for a processor that is not known.
    """
    config = read_image_config(directory)
    _find_processor(config)
    return partial(preprocess_images, config=config)


def read_image_config(directory: str | Path) -> dict[str, Any]:
    """Return the settings of a checkpoint's directory for its pictures and their places in texts: the keys of
    preprocessor_config.json, or of processor_config.json, and over them the tokens of tokenizer_config.json, the facts
    of processor_config.json, such as `image_seq_length`, and the `model_type` of config.json.

    **Raises** `FileNotFoundError` for a directory without preprocessor_config.json or processor_config.json.
    """
    names = (PREPROCESSOR_FILE, _PROCESSOR_FILE, "tokenizer_config.json", "config.json")
    preprocessor, processor, tokenizer, model = (_read_json(Path(directory) / name) for name in names)
    if not preprocessor and not processor:
        raise FileNotFoundError(f"{directory} has no {PREPROCESSOR_FILE}, which says how images become pixels")
    config = preprocessor or processor.get("image_processor", processor)
    extra = tokenizer.get("extra_special_tokens")
    if isinstance(extra, dict):
        tokenizer = {**extra, **tokenizer}
    tokens = {key: value for key, value in tokenizer.items() if key.endswith("_token")}
    facts = {key: value for key, value in processor.items() if value is not None and not isinstance(value, dict)}
    config = {**config, **tokens, **facts}
    if processor.get("processor_class", config.get("processor_class")) == "InternVLProcessor":
        config["crop_to_patches"] = True  # whatever the file of the image processor says
    if "model_type" in model:
        config["model_type"] = model["model_type"]
    return config


def _read_json(path: Path) -> dict[str, Any]:
    """Return the content of a file, nothing if there is none."""
    if not path.exists():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))


def preprocess_images(
    images: Sequence[Picture] | np.ndarray | jax.Array, config: Mapping[str, Any]
) -> Images | PatchedImages | ProcessedImages:
    """Return the pixels of pictures, in float32, by the settings of a preprocessor_config.json. The same as the image
    processors of transformers with PIL.

    - CLIP's, Chinese CLIP's, DINOv2's (BiT's) and SigLIP's make `Images`, and SigLIP 2's makes `PatchedImages`.
    - The image processors of models that read images in texts make `ProcessedImages` of the pictures of one text:
      LLaVA's, Gemma 3's, Idefics 3's, SmolVLM's and InternVL's (GOT-OCR 2's) images of one size; Qwen-VL's, Pixtral's
      and Gemma 4's packed patches. CLIP's and SigLIP's do, too, with the `processor_class` of LLaVA or PaliGemma.

    An alpha channel is laid over white, and gray becomes three equal channels. See `open_image` for what a
    picture may be.

    **Raises** `ValueError` for a processor or a step of it that is not known, for no pictures, for pictures of several
    sizes that the settings do not make equal, and as `open_image`; `ImportError` without Pillow.
    """
    processor = _find_processor(config)
    settings = _complete_settings(processor, config)
    is_list = isinstance(images, Sequence) and not isinstance(images, str | bytes)
    if not is_list and getattr(images, "ndim", 0) != 4:
        raise TypeError(f"images: expected a list of pictures, got {describe_argument(images)}")
    if len(images) == 0:
        raise ValueError("expected at least one picture")
    return processor.join([processor.process(open_image(image), settings) for image in images])


def preprocess_for_texts(images: Sequence[Picture], config: Mapping[str, Any]) -> ProcessedImages:
    """Return the pixels of the pictures of one text.

    **Raises** as `preprocess_images`, and `ValueError` for a processor of images without texts.
    """
    _find_text_processor(config)
    processed = preprocess_images(images, config)
    assert isinstance(processed, ProcessedImages)
    return processed


def measure_images(sizes: Sequence[tuple[int, int]], config: Mapping[str, Any]) -> ProcessedImages:
    """Return what `preprocess_images` makes of pictures in a text with these heights and widths, with pixels of zeros
    that take no memory. `expand_placeholders` takes it, so the tokens of a text are known without its pictures.

        size = zoo.images.read_picture_size("cat.png")  # reads the header of the file
        images = zoo.images.measure_images([size], config)

    **Raises** `ValueError` as `preprocess_images` does, and for a processor of pictures without texts.
    """
    processor = _find_text_processor(config)
    assert processor.measure is not None
    settings = _complete_settings(processor, config)
    measured = [processor.measure(size, settings) for size in sizes]
    return join_measured(measured, has_mask=processor.join is join_masked_tiles)


def _complete_settings(processor: _Processor, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with defaults. **Raises** `ValueError` for a step that is not known."""
    defaults = {**_COMMON, **processor.defaults}
    settings = {**defaults, **{key: value for key, value in config.items() if value is not None}}
    if unknown := [key for key in settings if key.startswith("do_") and settings[key] and key not in defaults]:
        raise ValueError(f"{unknown[0]} of {PREPROCESSOR_FILE} is a step that is not known here")
    return settings


def _find_text_processor(config: Mapping[str, Any]) -> _Processor:
    """**Raises** `ValueError` as `_find_processor`, and for a processor of images without texts."""
    processor = _find_processor(config)
    if processor.measure is None:
        name = config.get("image_processor_type") or config.get("feature_extractor_type")
        raise ValueError(
            f"{name} makes images without a text: processor_class of {PREPROCESSOR_FILE} or {_PROCESSOR_FILE} is "
            f"expected to be one of {', '.join(_IN_TEXTS)}"
        )
    return processor


def _find_processor(config: Mapping[str, Any]) -> _Processor:
    """**Raises** `ValueError` for a processor that is not known."""
    name = str(config.get("image_processor_type") or config.get("feature_extractor_type"))
    base = name.replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast").removesuffix("Pil")
    if base not in PROCESSORS:
        raise ValueError(f"image_processor_type = {name}, and known are {', '.join(PROCESSORS)}")
    processor = PROCESSORS[base]
    if processor.process is process_whole and config.get("processor_class") in _IN_TEXTS:
        return processor._replace(process=process_llava, join=join_tiles, measure=measure_llava)
    return processor


def _join_whole(images: list[Pixels]) -> Images:
    if sizes := {f"{x.shape[1]} x {x.shape[2]}" for x in images if x.shape != images[0].shape}:
        raise ValueError(f"pictures become {sizes.pop()} pixels and others: a batch has one size")
    return jnp.asarray(np.stack(images))


def _process_patches(image: RGB, settings: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Resize to the largest grid of patches of the picture's shape, and flatten them as (row, column, channel): SigLIP
    2 NaFlex (arXiv:2502.14786, section 2.4.2). Returns what `PatchedImages` hold for one picture."""
    patch = settings["patch_size"]
    most = settings["max_num_patches"]
    if settings["do_resize"]:
        rows, columns = _fit_grid(image.shape[:2], patch, most)
        image = resize_picture(image, (rows * patch, columns * patch), settings)
    rows, columns = image.shape[0] // patch, image.shape[1] // patch
    if rows * columns > most:
        raise ValueError(f"a picture has {rows * columns} patches, and max_num_patches = {most}")
    pixels = normalize_pixels(image, settings)
    flat = rearrange(pixels, "c (y h) (x w) -> (y x) (h w c)", h=patch, w=patch)
    padded = np.pad(flat, [(0, most - len(flat)), (0, 0)])
    return padded, np.arange(most) < len(flat), np.array([rows, columns], np.int32)


def _fit_grid(size: tuple[int, int], patch: int, most: int, precision: float = 1e-5) -> tuple[int, int]:
    """Return rows and columns of the patches that cover a picture of this size, scaled as far up as `most` patches
    allow. The scale is found by bisection, to the precision of transformers."""

    def count(scale: float) -> tuple[int, int]:
        rows, columns = (max(1, math.ceil(side * scale / patch)) for side in size)
        return rows, columns

    low = precision / 10
    high = 100.0
    while high - low >= precision:
        middle = (low + high) / 2
        if math.prod(count(middle)) <= most:
            low = middle
        else:
            high = middle
    return count(low)


def _join_patches(images: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> PatchedImages:
    return PatchedImages(*(jnp.asarray(np.stack(arrays)) for arrays in zip(*images, strict=True)))


PROCESSORS: Mapping[str, _Processor] = {
    "CLIPImageProcessor": _Processor(_CLIP, process_whole, _join_whole),
    "ChineseCLIPImageProcessor": _Processor(_CLIP, process_whole, _join_whole),
    "BitImageProcessor": _Processor(_CLIP, process_whole, _join_whole),
    "SiglipImageProcessor": _Processor(_SIGLIP, process_whole, _join_whole),
    "Siglip2ImageProcessor": _Processor(_NAFLEX, _process_patches, _join_patches),
    "LlavaImageProcessor": _Processor({**_CLIP, "do_pad": False}, process_llava, join_tiles, measure_llava),
    "Gemma3ImageProcessor": _Processor(_GEMMA3, process_gemma3, join_tiles, measure_gemma3),
    "Idefics3ImageProcessor": _Processor(_IDEFICS3, process_idefics3, join_masked_tiles, measure_idefics3),
    "SmolVLMImageProcessor": _Processor(_IDEFICS3, process_idefics3, join_masked_tiles, measure_idefics3),
    "GotOcr2ImageProcessor": _Processor({**_CLIP_COLORS, **_TILES}, process_internvl, join_tiles, measure_internvl),
    "Qwen2VLImageProcessor": _Processor(_QWEN, QWEN.process, join_patches, QWEN.measure),
    "PixtralImageProcessor": _Processor(_PIXTRAL, PIXTRAL.process, join_patches, PIXTRAL.measure),
    "Gemma4ImageProcessor": _Processor(_GEMMA4, GEMMA4.process, join_patches, GEMMA4.measure),
}
"""By the class in transformers."""
