"""Pictures in conversations: the placeholders that a template writes for them, and the pixels that the model reads.

config = zoo.images.read_image_config(directory)
question = [{"type": "image", "path": "cat.png"}, {"type": "text", "text": "What is it?"}]
messages = [{"role": "user", "content": question}]
tokens, images = encode_with_images(template, messages, config, tokenizer, add_generation_prompt=True)
new = zoo.generate(model, tokens[None], images=zoo.images.join_rows([images]), max_new_tokens=64)
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from zoo.images.pictures import Picture
from zoo.images.placeholders import expand_placeholders, find_placeholder
from zoo.images.preprocess import preprocess_for_texts
from zoo.images.processed import ProcessedImages

from ..tokenizers import Tokenizer
from .errors import ChatError
from .special_tokens import encode_rendered, protect, protect_options
from .template import ChatTemplate, RenderedChat, mark_spans, take_spans

_Messages = Sequence[Mapping[str, Any]]


class ChatWithImages(NamedTuple):
    """The text of a conversation with its pictures."""

    text: str
    """The text with as many image tokens as the model reads. Special tokens that messages spell are private characters,
    which `encode_rendered` and `encode_spans` write as text."""
    spans: tuple[tuple[int, int], ...]
    """Start and end, in characters, of what the template marks by `{% generation %}`."""
    images: ProcessedImages | None
    """The pixels of all pictures, in the order of the messages; None without any."""


def render_with_images(
    template: ChatTemplate, messages: _Messages, config: Mapping[str, Any], tokenizer: Tokenizer, **options: Any
) -> ChatWithImages:
    """Render a conversation with pictures, process them in order, and expand their placeholders.

    - `messages`: as for `ChatTemplate.render`. A `content` may be a list of parts, `{"type": "text", "text": ...}` and
      `{"type": "image", "image": ...}`, where `image`, or `path`, is what `zoo.images.open_image` takes.
    - `config`: of `zoo.images.read_image_config`.
    - `options`: as for `ChatTemplate.render`.

    A placeholder that a message spells is text.

    **Raises** `ChatError` for other parts, and for a template that does not write one placeholder for each picture;
    otherwise as `ChatTemplate.render` and `zoo.images.preprocess_images` do.
    """
    plain, pictures = take_pictures(messages)
    special = tokenizer.special_tokens
    chat = template.render(protect(plain, special), **protect_options(options, special))
    if not pictures:
        return ChatWithImages(*chat, None)
    check_placeholders(template, chat, len(pictures), config, tokenizer)
    images = preprocess_for_texts(pictures, config)
    return ChatWithImages(*expand_chat(chat, images, config), images)


def encode_with_images(
    template: ChatTemplate, messages: _Messages, config: Mapping[str, Any], tokenizer: Tokenizer, **options: Any
) -> tuple[Int[np.ndarray, "tokens"], ProcessedImages | None]:
    """Return the tokens of a conversation, and the pixels of its pictures. Arguments and errors are as in
    `render_with_images` and `ChatTemplate.encode`."""
    chat = render_with_images(template, messages, config, tokenizer, **options)
    return encode_rendered(chat.text, tokenizer), chat.images


def take_pictures(messages: _Messages) -> tuple[list[dict[str, Any]], list[Picture]]:
    """Return messages in which parts of images say only their type, and the pictures of these parts.

    **Raises** `ChatError` for parts that are neither texts nor images, and for an image that is not there.
    """
    plain = []
    pictures = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list | tuple):
            found = [_read_image(part, number) for part in content if _is_image(part, number)]
            pictures += found
            content = [{"type": "image"} if _is_image(part, number) else part for part in content]
            message = {**message, "content": content}
        plain.append(dict(message))
    return plain, pictures


def check_placeholders(
    template: ChatTemplate, chat: RenderedChat, count: int, config: Mapping[str, Any], tokenizer: Tokenizer
) -> None:
    """**Raises** `ChatError` for a text without one placeholder for each of `count` pictures, and for a tokenizer that
    writes the placeholder as text."""
    placeholder = find_placeholder(config)
    if placeholder not in tokenizer.special_tokens:
        raise ChatError(f"{placeholder} stands for a picture, and is not a special token of the tokenizer")
    if (written := chat.text.count(placeholder)) != count:
        raise ChatError(
            f"{template.name} writes {placeholder} {written} times, and the messages have {count} pictures: it takes "
            "them elsewhere, or not at all"
        )


def expand_chat(chat: RenderedChat, images: ProcessedImages, config: Mapping[str, Any]) -> RenderedChat:
    """Expand the placeholders of a rendered conversation, and move the spans with the text. **Raises** `ValueError` as
    `zoo.images.expand_placeholders`."""
    return take_spans(expand_placeholders(mark_spans(chat), images, config))


def reads_parts(template: ChatTemplate) -> bool:
    """Return True for a template that writes the text of a message that consists of parts."""
    part = {"type": "text", "text": "probe"}
    try:
        text = template.render([{"role": "user", "content": [part]}]).text
    except ChatError:
        return False
    return "probe" in text and re.search(r"""["']: *["']probe""", text) is None  # which is a part as Python writes it


def _is_image(part: Any, number: int) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return False
    if kind != "image":
        described = "text" if kind == "text" else f"the type {kind!r}"
        raise ChatError(f"message {number} has a part of {described}: expected a text, or an image, of these types")
    return True


def _read_image(part: Mapping[str, Any], number: int) -> Picture:
    given = [part[name] for name in ("image", "path") if part.get(name) is not None]
    if len(given) != 1:
        keys = ", ".join(key for key in part if key != "type") or "nothing else"
        raise ChatError(f"message {number} has an image with {keys}: expected one picture, as image or path")
    if isinstance(given[0], str) and given[0].startswith(("http://", "https://")):
        raise ChatError(f"message {number} has an image at {given[0]}, which is not downloaded: expected a file")
    return given[0]
