"""Pictures as arrays of gray levels: open, resize, crop and normalize them, as transformers does with PIL."""

import contextlib
import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange
from jaxtyping import Float, UInt8

from zoo._checks import describe_argument
from zoo._optional import import_optional

_INSTALL = "pip install 'equizoo[images]'"
_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)
"""Orientations in EXIF data that exchange height and width."""

Picture = Any
"""A `PIL.Image.Image`; an array of gray levels from 0 to 255, "height width" or "height width channels"; the path of a
file, or its bytes."""
RGB = UInt8[np.ndarray, "_ _ 3"]
Pixels = Float[np.ndarray, "3 _ _"]


def open_image(image: Picture) -> RGB:
    """Return a picture as RGB. An alpha channel is laid over white, and gray becomes three equal channels. A file is
    turned upright, as its EXIF data say.

    **Raises** `TypeError` for what is not a picture, and for other gray levels than 0 to 255, which Pillow would cut;
    `ValueError` for a file that is not an image, is cut off or has more pixels than Pillow opens, and for a picture
    without pixels; `ImportError` without Pillow.
    """
    pillow = import_optional("PIL.Image", _INSTALL)
    name = getattr(image, "filename", None) or "a picture"
    if isinstance(image, str | Path):
        name = str(image)
        image = Path(image).read_bytes()
    if hasattr(image, "dtype"):
        if image.dtype != np.uint8 or image.ndim < 2 or image.shape[2:] not in ((), (1,), (3,), (4,)):
            expected = 'gray levels from 0 to 255, uint8 "height width channels"'
            raise TypeError(f"images: expected {expected}, got {describe_argument(image)}")
        if 0 in image.shape:
            raise ValueError(f"a picture has {image.shape[0]} x {image.shape[1]} pixels: expected at least 1 x 1")
        image = pillow.fromarray(np.asarray(image[..., 0] if image.shape[2:] == (1,) else image))
    elif not isinstance(image, pillow.Image | bytes):
        raise TypeError(f"images: expected PIL images, arrays, paths or bytes, got {describe_argument(image)}")
    with _explain(name):
        if isinstance(image, bytes):
            image = import_optional("PIL.ImageOps", _INSTALL).exif_transpose(pillow.open(io.BytesIO(image)))
        _check_levels(image)
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            image = pillow.alpha_composite(pillow.new("RGBA", image.size, (255, 255, 255, 255)), image)
        return np.asarray(image.convert("RGB"))


def read_picture_size(image: str | Path | bytes) -> tuple[int, int]:
    """Return the height and width of a picture as `open_image` opens it, upright. Of a file, or its bytes, only the
    header is read.

    **Raises** `FileNotFoundError` for a path that does not exist; `ValueError` for a file that is not an image, or with
    a header that is cut off; `TypeError` and `ImportError` as `open_image`.
    """
    pillow = import_optional("PIL.Image", _INSTALL)
    name = "a picture" if isinstance(image, bytes) else str(image)
    with _explain(name), pillow.open(io.BytesIO(image) if isinstance(image, bytes) else image) as opened:
        # The method of PNG reads all pixels, since EXIF data may follow them.
        orientation = pillow.Image.getexif(opened).get(_ORIENTATION, 1)
        width, height = opened.size
        _check_levels(opened)
    return (width, height) if orientation in _TURNED else (height, width)


@contextlib.contextmanager
def _explain(name: str) -> Iterator[None]:
    """Raise the errors of Pillow as `ValueError`s about a picture."""
    pillow = import_optional("PIL.Image", _INSTALL)
    try:
        yield
    except FileNotFoundError:
        raise
    except pillow.UnidentifiedImageError as error:
        raise ValueError(f"{name} is not an image: expected a file that Pillow opens, such as PNG or JPEG") from error
    except pillow.DecompressionBombError as error:
        raise ValueError(f"{name} is too large ({error}): expected a smaller picture") from error
    except (OSError, SyntaxError, EOFError) as error:
        raise ValueError(f"{name} is cut off or damaged ({error}): expected a whole image") from error


def _check_levels(image: Any) -> None:
    """**Raises** `TypeError` for other gray levels than 0 to 255."""
    if image.mode == "F" or image.mode.startswith("I"):
        raise TypeError(f"images: expected gray levels from 0 to 255, got a picture of mode {image.mode}")


def check_resized(before: tuple[int, ...], size: tuple[int, int]) -> None:
    """**Raises** `ValueError` for a size of 0, which is asked for if a picture is too long for the settings."""
    if min(size) < 1:
        pixels = f"{before[0]} x {before[1]} pixels"
        raise ValueError(f"a picture of {pixels} would become {size[0]} x {size[1]}: crop its longer edge")


def resize_picture(image: RGB, size: tuple[int, int], settings: Mapping[str, Any]) -> RGB:
    """Resize to (height, width), to whole gray levels, by the filter that `resample` numbers in PIL. **Raises**
    `ValueError` as `check_resized` does."""
    check_resized(image.shape, size)
    pillow = import_optional("PIL.Image", _INSTALL)
    return np.asarray(pillow.fromarray(image).resize(size[::-1], resample=settings["resample"]))


def read_size(before: tuple[int, ...], size: Any) -> tuple[int, int]:
    """Return the height and width that a config's `size` asks for of a picture of the size `before`: given, or of the
    shorter edge, which a plain number is. **Raises** `ValueError` for a size that says something else."""
    if isinstance(size, int):
        size = {"shortest_edge": size}
    if size.keys() == {"height", "width"}:
        return size["height"], size["width"]
    if size.keys() != {"shortest_edge"}:
        raise ValueError(f"size = {size}: expected height and width, or shortest_edge")
    height, width = before[:2]
    short = size["shortest_edge"]
    long = int(short * max(height, width) / min(height, width))
    return (long, short) if height >= width else (short, long)


def read_edge(settings: Mapping[str, Any], key: str) -> int:
    """Return the `longest_edge` of a setting. **Raises** `ValueError` for a setting that says something else."""
    if settings[key].keys() != {"longest_edge"}:
        raise ValueError(f"{key} = {settings[key]}: expected longest_edge")
    return settings[key]["longest_edge"]


def read_crop(size: Any) -> tuple[int, int]:
    """Return the height and width of a config's `crop_size`."""
    return (size, size) if isinstance(size, int) else (size["height"], size["width"])


def crop_center(image: RGB, size: Any) -> RGB:
    """Crop at the center, with black around a picture that is smaller."""
    for axis, crop in enumerate(read_crop(size)):
        missing = max(crop - image.shape[axis], 0)
        start = max(image.shape[axis] - crop, 0) // 2
        pads = [(0, 0)] * 3
        pads[axis] = (math.ceil(missing / 2), missing // 2)
        image = np.pad(image, pads).take(range(start, start + crop), axis=axis)
    return image


def normalize_pixels(image: RGB, settings: Mapping[str, Any]) -> Pixels:
    """Return (rescale_factor x - mean) / std for each channel."""
    x = image.astype(np.float32)
    if settings["do_rescale"]:
        x = x * np.float32(settings["rescale_factor"])
    if settings["do_normalize"]:
        x = (x - np.float32(settings["image_mean"])) / np.float32(settings["image_std"])
    return rearrange(x, "y x c -> c y x")


def process_whole(image: RGB, settings: Mapping[str, Any]) -> Pixels:
    """Resize, crop and normalize: CLIP, Chinese CLIP, DINOv2, SigLIP."""
    if settings["do_resize"]:
        image = resize_picture(image, read_size(image.shape, settings["size"]), settings)
    if settings["do_center_crop"]:
        image = crop_center(image, settings["crop_size"])
    return normalize_pixels(image, settings)
