"""From pictures to pixels by a checkpoint's preprocessor_config.json: resize, crop, normalize, or cut into patches.

A picture is opened as RGB, and resized by PIL's filters to whole gray levels, before it becomes an array of numbers.
Each processor is a function of one picture and its settings.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Float, UInt8

from zoo._checks import describe_argument
from zoo._optional import import_optional
from zoo.layers.encoders.patches import Images, PatchedImages

PREPROCESSOR_FILE = "preprocessor_config.json"
_PROCESSOR_FILE = "processor_config.json"
_INSTALL = "pip install 'equizoo[images]'"
_CLIP = {
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
    "do_center_crop": True,
    "resample": 3,
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
_SIGLIP = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
_STEPS = {"do_convert_rgb", "do_resize", "do_center_crop", "do_rescale", "do_normalize"}
_COMMON = {
    "do_resize": True,
    "do_center_crop": False,
    "do_rescale": True,
    "do_normalize": True,
    "rescale_factor": 1 / 255,
}

Picture = Any
"""A `PIL.Image.Image`, or an array of gray levels from 0 to 255, "height width" or "height width channels"."""
RGB = UInt8[np.ndarray, "_ _ 3"]
Pixels = Float[np.ndarray, "3 _ _"]


class _Processor(NamedTuple):
    """The image processor of a class in transformers."""

    defaults: Mapping[str, Any]
    process: Callable[[RGB, Mapping[str, Any]], Any]
    join: Callable[[list], Any]
    """From the results of all pictures to a batch."""


def make_image_processor(directory: str | Path) -> Callable[[Sequence[Picture]], Any]:
    """Return the function from pictures to pixels of a checkpoint's directory: `preprocess_images` with its config.

        process = zoo.images.make_image_processor(directory)
        vectors = zoo.embed(model, images=process([PIL.Image.open("cat.png")]))

    **Raises** `FileNotFoundError` for a directory without preprocessor_config.json or processor_config.json, and
    `ValueError` for a processor that is not known.
    """
    for name in (PREPROCESSOR_FILE, _PROCESSOR_FILE):
        if (path := Path(directory) / name).exists():
            config = json.loads(path.read_text(encoding="utf-8"))
            config = config.get("image_processor", config)
            _find_processor(config)
            return partial(preprocess_images, config=config)
    raise FileNotFoundError(f"{directory} has no {PREPROCESSOR_FILE}, which says how images become pixels")


def preprocess_images(images: Sequence[Picture], config: Mapping[str, Any]) -> Images | PatchedImages:
    """Return the pixels of pictures, in float32, by the settings of a preprocessor_config.json. The same as the image
    processors of transformers with PIL: CLIP's, Chinese CLIP's and SigLIP's, and SigLIP 2's, which makes
    `PatchedImages`.

    An alpha channel is laid over white, and gray becomes three equal channels.

    **Raises** `ValueError` for a processor or a step of it that is not known, for no pictures, and for pictures of
    several sizes that the settings do not make equal; `ImportError` without Pillow.
    """
    processor = _find_processor(config)
    settings = {**_COMMON, **processor.defaults, **{key: value for key, value in config.items() if value is not None}}
    if unknown := [key for key in settings if key.startswith("do_") and settings[key] and key not in _STEPS]:
        raise ValueError(f"{unknown[0]} of {PREPROCESSOR_FILE} is a step that is not known here")
    if not isinstance(images, Sequence) and getattr(images, "ndim", 0) != 4:
        raise TypeError(f"images: expected a list of pictures, got {describe_argument(images)}")
    if len(images) == 0:
        raise ValueError("expected at least one picture")
    return processor.join([processor.process(_open_rgb(image), settings) for image in images])


def _find_processor(config: Mapping[str, Any]) -> _Processor:
    """**Raises** `ValueError` for a processor that is not known."""
    name = str(config.get("image_processor_type") or config.get("feature_extractor_type"))
    base = name.replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast").removesuffix("Pil")
    if base not in PROCESSORS:
        raise ValueError(f"image_processor_type = {name}, and known are {', '.join(PROCESSORS)}")
    return PROCESSORS[base]


def _open_rgb(image: Picture) -> RGB:
    """Return a picture as RGB. **Raises** `TypeError` for what is not a picture, and for other gray levels than 0 to
    255, which Pillow would cut."""
    pillow = import_optional("PIL.Image", _INSTALL)
    if hasattr(image, "dtype"):
        if image.dtype != np.uint8 or image.shape[2:] not in ((), (1,), (3,), (4,)):
            expected = 'gray levels from 0 to 255, uint8 "height width channels"'
            raise TypeError(f"images: expected {expected}, got {describe_argument(image)}")
        image = pillow.fromarray(np.asarray(image[..., 0] if image.shape[2:] == (1,) else image))
    if image.mode == "F" or image.mode.startswith("I"):
        raise TypeError(f"images: expected gray levels from 0 to 255, got a picture of mode {image.mode}")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = pillow.alpha_composite(pillow.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return np.asarray(image.convert("RGB"))


def _resize(image: RGB, size: tuple[int, int], settings: Mapping[str, Any]) -> RGB:
    """Resize to (height, width), to whole gray levels, by the filter that `resample` numbers in PIL."""
    pillow = import_optional("PIL.Image", _INSTALL)
    return np.asarray(pillow.fromarray(image).resize(size[::-1], resample=settings["resample"]))


def _read_size(image: RGB, size: Any) -> tuple[int, int]:
    """Return the height and width that a config's `size` asks for: given, or of the shorter edge, which a plain number
    is. **Raises** `ValueError` for a size that says something else."""
    if isinstance(size, int):
        size = {"shortest_edge": size}
    if size.keys() == {"height", "width"}:
        return size["height"], size["width"]
    if size.keys() != {"shortest_edge"}:
        raise ValueError(f"size = {size}: expected height and width, or shortest_edge")
    height, width = image.shape[:2]
    short = size["shortest_edge"]
    long = int(short * max(height, width) / min(height, width))
    return (long, short) if height >= width else (short, long)


def _crop_center(image: RGB, size: Any) -> RGB:
    """Crop at the center, with black around a picture that is smaller."""
    if isinstance(size, int):
        size = {"height": size, "width": size}
    for axis, crop in enumerate((size["height"], size["width"])):
        missing = max(crop - image.shape[axis], 0)
        start = max(image.shape[axis] - crop, 0) // 2
        pads = [(0, 0)] * 3
        pads[axis] = (math.ceil(missing / 2), missing // 2)
        image = np.pad(image, pads).take(range(start, start + crop), axis=axis)
    return image


def _normalize(image: RGB, settings: Mapping[str, Any]) -> Pixels:
    """Return (rescale_factor x - mean) / std for each channel."""
    x = image.astype(np.float32)
    if settings["do_rescale"]:
        x = x * np.float32(settings["rescale_factor"])
    if settings["do_normalize"]:
        x = (x - np.float32(settings["image_mean"])) / np.float32(settings["image_std"])
    return rearrange(x, "y x c -> c y x")


def _process_whole(image: RGB, settings: Mapping[str, Any]) -> Pixels:
    """Resize, crop and normalize: CLIP, Chinese CLIP, SigLIP."""
    if settings["do_resize"]:
        image = _resize(image, _read_size(image, settings["size"]), settings)
    if settings["do_center_crop"]:
        image = _crop_center(image, settings["crop_size"])
    return _normalize(image, settings)


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
        image = _resize(image, (rows * patch, columns * patch), settings)
    rows, columns = image.shape[0] // patch, image.shape[1] // patch
    if rows * columns > most:
        raise ValueError(f"a picture has {rows * columns} patches, and max_num_patches = {most}")
    pixels = _normalize(image, settings)
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
    "CLIPImageProcessor": _Processor(_CLIP, _process_whole, _join_whole),
    "ChineseCLIPImageProcessor": _Processor(_CLIP, _process_whole, _join_whole),
    "SiglipImageProcessor": _Processor(
        {**_SIGLIP, "size": {"height": 224, "width": 224}, "resample": 3}, _process_whole, _join_whole
    ),
    "Siglip2ImageProcessor": _Processor(
        {**_SIGLIP, "patch_size": 16, "max_num_patches": 256, "resample": 2}, _process_patches, _join_patches
    ),
}
"""By the class in transformers."""
