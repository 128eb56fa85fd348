"""Pictures in messages: the parts of a record that are pictures, and the tokens that each becomes.

A part of a `content` is one of

    {"type": "text", "text": "What is it?"}
    {"type": "image", "path": "cat.png"}                     relative to the file of records
    {"type": "image", "bytes": ...}                          in JSON as base64
    {"type": "image", "image": {"bytes": ..., "path": ...}}  as `datasets` keeps images
    {"type": "image"}                                        the next picture of the field `images` or `image`

or a `content` is text with `<image>` for each next picture of that field. Sizes of pictures, on which the number of
their tokens depends, are read from headers.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.images import expand_placeholders, measure_images, read_picture_size
from zoo.images.placeholders import find_placeholder, list_picture_tokens
from zoo.text.chat.errors import ChatError
from zoo.text.chat.template import ChatTemplate, RenderedChat, mark_spans, take_spans
from zoo.text.tokenizers import Tokenizer

from .json_lines import JsonLines
from .record_file import RecordError, RecordFile

_FIELDS = ("messages", "prompt", "completion")
_COLUMNS = ("images", "image")
_PLACEHOLDER = "<image>"
"""Stands for a picture in texts of data sets, whatever a model's own placeholder is."""
_PROBE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]
SIDE = 1344
"""Pixels of a side that is whole in patches and tokens of all families."""
_Record = Mapping[str, Any]
_Source = str | bytes
"""The path of a picture, or its bytes."""


class Parts(list):
    """The parts of a `content`, checked."""


@dataclass(frozen=True)
class PlacedPicture:
    """A picture of a record, without its pixels.

    - `path`: as the record has it; None for a picture within the record, which has a `digest`.
    - `text`: the tokens that stand for it. `shape`: as in `ProcessedImages.shapes`. `length`: its images, or patches.
    """

    path: str | None
    digest: str | None
    text: str = field(repr=False)
    shape: tuple[int, int] = field(repr=False)
    length: int = field(repr=False)


def check_pictures(config: Mapping[str, Any], tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
    """**Raises** `ValueError` for a config with which pictures have several sizes, or an unknown number of tokens, and
    for a tokenizer or a template of texts only; `NotImplementedError` for a model that needs `spans`."""
    placeholder = find_placeholder(config)
    if config.get("model_type") == "paligemma":
        raise NotImplementedError("records with images: paligemma needs `spans` of its prefixes, which are not made")
    expand_placeholders(2 * placeholder, measure_images([(SIDE, SIDE), (SIDE, 2 * SIDE)], config), config)
    if missing := [word for word in list_picture_tokens(config) if word not in tokenizer.special_tokens]:
        raise ValueError(f"the tokenizer has no special token {missing[0]}, which images need: it is for texts only")
    if template is None:
        return
    try:
        count = template.render(_PROBE).text.count(placeholder)
    except ChatError as error:
        raise ValueError(f"an image needs a chat template that writes {placeholder} for it: {error}") from None
    if count != 1:
        raise ValueError(f"{template.name} writes no {placeholder} for an image: it is for texts only")


def place_pictures(record: _Record, file: RecordFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with checked `Parts`, of which each image has its `PlacedPicture`.

    **Raises** `RecordError` for other parts, for a picture that is not there or is not an image, and for more or fewer
    pictures than places for them.
    """
    placeholder = find_placeholder(config)

    def place(source: _Source) -> PlacedPicture:
        digest = None
        path = None
        image: Path | bytes
        if isinstance(source, bytes):
            if isinstance(file, JsonLines) and not file.finds_records:
                raise RecordError("a picture within a compressed file, or an array, is not found again: write its path")
            digest = hashlib.blake2b(source, digest_size=16).hexdigest()
            image = source
        else:
            path = source
            image = file.path.parent / source
        try:
            size = read_picture_size(image)
        except FileNotFoundError:
            raise RecordError(f"there is no picture {image}") from None
        except (OSError, ValueError, TypeError) as error:
            raise RecordError(str(error)) from None
        try:
            measured = measure_images([size], config)
        except ValueError as error:
            raise RecordError(f"{path or 'a picture'}: {error}") from None
        text = expand_placeholders(placeholder, measured, config)
        rows, columns = measured.shapes[0].tolist()
        return PlacedPicture(path, digest, text, (rows, columns), len(measured.pixels))

    return _map_pictures(record, placeholder, place)


def find_sources(record: _Record, config: Mapping[str, Any]) -> list[_Source]:
    """Return the path, or the bytes, of each picture of a record, in the order of their places."""
    sources: list[_Source] = []
    _map_pictures(record, find_placeholder(config), sources.append)
    return sources


def list_pictures(messages: Sequence[_Record]) -> list[PlacedPicture]:
    """Return the pictures of messages, in their order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["picture"] for part in parts if "picture" in part]


@dataclass(frozen=True)
class PictureTemplate:
    """A chat template that writes the tokens of the pictures in messages, for `encode_conversation`."""

    template: ChatTemplate
    placeholder: str

    @property
    def name(self) -> str:
        return self.template.name

    @property
    def marks_generation(self) -> bool:
        return self.template.marks_generation

    def render(self, messages: Sequence[_Record], **options: Any) -> RenderedChat:
        """Return the text with all tokens of its pictures, and the spans of the assistant in it.

        **Raises** `ChatError` for a template that does not write a placeholder for each picture.
        """
        pictures = list_pictures(messages)
        chat = self.template.render([_strip_pictures(message) for message in messages], **options)
        before, *after = mark_spans(chat).split(self.placeholder)
        if len(after) != len(pictures):
            raise ChatError(
                f"{self.name} writes {len(after)} times {self.placeholder} for {len(pictures)} pictures: expected "
                "it once for each"
            )
        return take_spans(before + "".join(each.text + rest for each, rest in zip(pictures, after, strict=True)))


def _strip_pictures(message: _Record) -> dict[str, Any]:
    """Return a message for a template, with only the type of its images."""
    content = message.get("content")
    if isinstance(content, list):
        content = [{key: value for key, value in part.items() if key != "picture"} for part in content]
    return {**message, "content": content}


def _map_pictures(record: _Record, placeholder: str, make: Callable[[_Source], Any]) -> dict[str, Any]:
    """Return a record with checked `Parts`, of which each image has what `make` returns for its source."""
    name = next((name for name in _COLUMNS if record.get(name) is not None), _COLUMNS[0])
    column = record.get(name, [])
    if not isinstance(column, list | tuple):
        column = [column]
    waiting = iter(column)
    num_places = 0

    def convert_part(part: Any, where: str) -> dict[str, Any]:
        nonlocal num_places
        part = {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if part.get("type") != "image":
            raise RecordError(f"{where} has a part of the type {part.get('type')}: expected text with `text`, or image")
        if "image" in part:
            return {"type": "image", "picture": make(_read_picture(part["image"], where))}
        if part.keys() & {"path", "bytes"}:
            return {"type": "image", "picture": make(_read_picture(part, where))}
        num_places += 1
        if len(part) > 1 or num_places > len(column):
            raise RecordError(
                f"{where} has an image without a picture: expected `path`, `bytes` or `image`, or the next one of "
                f"`{name}`, which has {len(column)}"
            )
        return {"type": "image", "picture": make(_read_picture(next(waiting), f"`{name}`"))}

    def convert(message: Any, where: str) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str) and column:
            pieces = re.split(f"({_PLACEHOLDER}|{re.escape(placeholder)})", content)
            if len(pieces) > 1:
                content = [_convert_piece(number, piece) for number, piece in enumerate(pieces) if piece]
        if isinstance(content, list):
            content = Parts(convert_part(part, where) for part in content)
        texts = [part.get("text", "") for part in content] if isinstance(content, Parts) else [content]
        for word in (placeholder, _PLACEHOLDER):
            if any(isinstance(text, str) and word in text for text in texts):
                raise RecordError(f"{where} spells {word}, which stands for an image: write a part of the type image")
        if not isinstance(content, Parts):
            return message
        if message.get("role") == "assistant" and list_pictures([{"content": content}]):
            raise RecordError(f"{where} has an image in an answer: the assistant writes text only")
        return {**message, "content": content}

    mapped = dict(record)
    for key in _FIELDS:
        messages = record.get(key)
        if isinstance(messages, list):
            mapped[key] = [convert(message, f"`{key}`[{number}]") for number, message in enumerate(messages)]
    if num_places < len(column):
        raise RecordError(
            f"`{name}` has {len(column)} pictures, and messages have {num_places} places for them: write "
            f"{_PLACEHOLDER}, or a part of the type image, for each"
        )
    return mapped


def _convert_piece(number: int, piece: str) -> dict[str, Any]:
    """Return the part that a piece of a text is, of which every second one is a placeholder."""
    if number % 2:
        return {"type": "image"}
    return {"type": "text", "text": piece}


def _read_picture(value: Any, where: str) -> _Source:
    """Return the path or the bytes of a picture. Bytes win: next to them a path is a name."""
    if isinstance(value, Mapping):
        content = value.get("bytes")
        if isinstance(content, str):
            try:
                return base64.b64decode(content, validate=True)
            except ValueError:
                raise RecordError(f"{where} has `bytes` that are not base64") from None
        value = value.get("path") if content is None else content
    if isinstance(value, str | bytes) and value:
        return value
    raise RecordError(f"{where} has a picture of type {type(value).__name__}: expected its path, or `bytes` of a file")
