"""The places of pictures in a text: each family's tokens that stand for a picture, around it and between its tiles.

`shape` is a picture's row of `ProcessedImages.shapes`, `length` the number of tokens of an image of fixed size, and
`words` the family's special tokens by their names in a tokenizer's config.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .processed import ProcessedImages

_Words = Mapping[str, str]


class _Family(NamedTuple):
    """What a family writes for a picture."""

    expand: Callable[[_Words, tuple[int, int], int], str]
    words: _Words
    """The default tokens. The first one stands for a picture in the text."""
    length: int | None = None
    """The tokens of an image of fixed size where a config does not say it."""
    packed: bool = False
    """True for a family that reads packed patches, with shapes in tokens."""
    around: tuple[str, str] = ("", "")
    """What chat templates write before and after a placeholder."""


def expand_placeholders(text: str, images: ProcessedImages, config: Mapping[str, Any]) -> str:
    """Replace each placeholder of a picture, such as `<image>`, by as many image tokens as the model reads, with the
    breaks and names of tiles of its family: the text for the tokenizer.

        config = zoo.images.read_image_config(directory)
        images = zoo.images.preprocess_images(["cat.png"], config)
        text = zoo.images.expand_placeholders("<image> What is it?", images, config)

    In PaliGemma BOS follows the last picture, and a line break the text; its answer is tokenized by itself.

    **Raises** `ValueError` for a text with more or fewer placeholders than pictures, for a `model_type` that does not
    read pictures, and for a config that does not say how many tokens an image has.
    """
    family = _find_family(config)
    words = _read_words(config)
    placeholder = find_placeholder(config)
    before, *after = text.split(placeholder)
    if len(after) != len(images.shapes):
        raise ValueError(
            f"the text has {len(after)} placeholders {placeholder} and there are {len(images.shapes)} pictures: "
            "expected one for each picture"
        )
    if family.packed != (images.grids is not None):
        raise ValueError(f"model_type = {config['model_type']} reads other images: process them with its own config")
    length = 0 if family.packed else _count_image_tokens(images, config, family)
    expanded = [family.expand(words, (int(rows), int(columns)), length) for rows, columns in images.shapes]
    if config["model_type"] == "paligemma":
        expanded[-1] += words["bos_token"]
        after[-1] += "\n"
    return before + "".join(image + rest for image, rest in zip(expanded, after, strict=True))


def find_placeholder(config: Mapping[str, Any]) -> str:
    """Return the token that stands for a picture in a text. **Raises** `ValueError` for a `model_type` that does not
    read pictures."""
    return next(iter(_read_words(config).values()))


def write_placeholders(count: int, config: Mapping[str, Any]) -> str:
    """Return the placeholders of pictures before a text, as chat templates of the family write them. **Raises** as
    `find_placeholder`."""
    before, after = _find_family(config).around
    return (before + find_placeholder(config) + after) * count


def list_picture_tokens(config: Mapping[str, Any]) -> list[str]:
    """Return the special tokens of the family's pictures. **Raises** as `find_placeholder`."""
    return list(_read_words(config).values())


def _find_family(config: Mapping[str, Any]) -> _Family:
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise ValueError(f"model_type = {model_type} of the config: expected one of {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def _read_words(config: Mapping[str, Any]) -> _Words:
    words = _find_family(config).words
    return {name: _read_token(config.get(name)) or word for name, word in words.items()}


def _read_token(token: Any) -> str | None:
    """Return a token of a tokenizer's config, which may be a mapping with its `content`."""
    return token["content"] if isinstance(token, Mapping) else token


def _count_image_tokens(images: ProcessedImages, config: Mapping[str, Any], family: _Family) -> int:
    """Return the number of tokens of an image of fixed size. LLaVA's is (height / patch) (width / patch), and one for
    a class token if it is kept."""
    patch = config.get("patch_size")
    if family.expand is _expand_plain and patch is not None:
        height, width = images.pixels.shape[2:]
        dropped = int(config.get("vision_feature_select_strategy") == "default")
        return (height // patch) * (width // patch) + config.get("num_additional_image_tokens", 0) - dropped
    length = config.get("image_seq_length", config.get("image_seq_len", family.length))
    if length is None:
        raise ValueError("the config has no image_seq_length and no patch_size: processor_config.json says one of them")
    return length


def _expand_plain(words: _Words, shape: tuple[int, int], length: int) -> str:
    return words["image_token"] * length


def _expand_patches(words: _Words, shape: tuple[int, int], length: int) -> str:
    return words["image_token"] * (shape[0] * shape[1])


def _expand_framed(words: _Words, shape: tuple[int, int], length: int) -> str:
    return words["boi_token"] + _expand_patches(words, shape, length) + words["eoi_token"]


def _expand_rows(words: _Words, shape: tuple[int, int], length: int) -> str:
    row = words["image_token"] * shape[1]
    return words["image_break_token"].join([row] * shape[0]) + words["image_end_token"]


def _expand_crops(words: _Words, shape: tuple[int, int], length: int) -> str:
    image = f"\n\n{words['boi_token']}{words['image_token'] * length}{words['eoi_token']}\n\n"
    crops = " ".join([image] * (shape[0] * shape[1]))
    if not crops:
        return image
    return f"Here is the original image {image} and here are some crops to help you see better {crops}"


def _expand_tiles(words: _Words, shape: tuple[int, int], length: int) -> str:
    around = words["fake_image_token"]
    image = words["image_token"] * length
    rows, columns = shape
    lines = [
        "".join(f"{around}<row_{row}_col_{column}>{image}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    ]
    if lines:
        lines.append("\n")
    return "".join(lines) + around + words["global_image_token"] + image + around


def _expand_counted(words: _Words, shape: tuple[int, int], length: int) -> str:
    image = words["context_image_token"] * (length * (shape[0] * shape[1] + 1))
    return words["start_image_token"] + image + words["end_image_token"]


_QWEN = _Family(
    _expand_patches, {"image_token": "<|image_pad|>"}, packed=True, around=("<|vision_start|>", "<|vision_end|>")
)
_PIXTRAL = _Family(
    _expand_rows,
    {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    packed=True,
)
_IDEFICS3 = _Family(
    _expand_tiles,
    {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"},
    169,
)
FAMILIES: Mapping[str, _Family] = {
    "llava": _Family(_expand_plain, {"image_token": "<image>"}, around=("", "\n")),
    "paligemma": _Family(_expand_plain, {"image_token": "<image>", "bos_token": "<bos>"}),
    "gemma3": _Family(
        _expand_crops,
        {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"},
        256,
    ),
    "gemma4": _Family(
        _expand_framed,
        {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"},
        packed=True,
    ),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    "pixtral": _PIXTRAL,
    "mistral3": _PIXTRAL,
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    "internvl": _Family(
        _expand_counted,
        {"context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>"},
        256,
    ),
}
"""By model_type."""
