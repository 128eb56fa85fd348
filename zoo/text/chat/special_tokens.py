"""Tokens of a rendered conversation, in which only the template makes special tokens.

What a message spells like a special token is replaced before the template renders it, and written as text after.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from ..tokenizers import Tokenizer
from .errors import ChatError

_FIRST_WRITTEN = 0xF0000
"""First of the private characters that stand for special tokens which a message spells."""
_LITERAL = "\U0010fffd"
"""Private character before a character that stands for itself."""
_NAME_FIELDS = ("role", "type")
"""Fields that templates compare with names of their own."""


def protect(messages: Iterable[Mapping[str, Any]], special_tokens: Iterable[str]) -> list[dict[str, Any]]:
    """Replace special tokens that messages spell by private characters, which `encode_rendered` writes as text.

    The private characters themselves, and the end of a text that begins a special token, are kept from being read as
    one by a character before them.
    """
    spellings = _index_spellings(tuple(special_tokens))
    return [_protect_value(dict(message), spellings) for message in messages]


def protect_options(options: Mapping[str, Any], special_tokens: Iterable[str]) -> dict[str, Any]:
    """Protect `tools` and `documents` among the options of a rendering, as `protect` does messages."""
    spellings = _index_spellings(tuple(special_tokens))
    texts = {name: _protect_value(options[name], spellings) for name in ("tools", "documents") if name in options}
    return {**options, **texts}


def encode_rendered(text: str, tokenizer: Tokenizer) -> Int[np.ndarray, "tokens"]:
    """Tokenize a rendered conversation, in which `protect` has replaced special tokens that are text.

    Text without any is tokenized as a whole, as transformers does. What lies between two special tokens of the template
    is tokenized as plain text if a message spells a special token there.

    **Raises** `ChatError` for a special token in a message that the tokenizer cannot write as text.
    """
    return encode_text(text, tokenizer).tokens


class _Spellings(NamedTuple):
    """How `protect` writes special tokens, and reads them again."""

    replacements: Mapping[str, str]
    spelled: re.Pattern[str]
    """Matches what is replaced in a message."""
    written: re.Pattern[str]
    """Matches what it is replaced by."""
    beginnings: frozenset[str]
    """Proper beginnings of special tokens."""
    first_characters: frozenset[str]
    longest: int

    def protect(self, text: str) -> str:
        text = self.spelled.sub(lambda found: self.replacements.get(found[0], _LITERAL + found[0]), text)
        # A template may write another message right after it, which goes on with the rest of a special token.
        tail = text[-self.longest :]
        may_begin = not self.first_characters.isdisjoint(tail)
        if may_begin and any(tail[start:] in self.beginnings for start in range(len(tail))):
            text = text[:-1] + _LITERAL + text[-1]
        return text

    def spell(self, written: str, special_tokens: Sequence[str]) -> str:
        if written[0] == _LITERAL:
            return written[1:]
        return special_tokens[ord(written) - _FIRST_WRITTEN]


class SpelledText(NamedTuple):
    """A tokenized text in which special tokens that messages spell are text again."""

    text: str
    tokens: Int[np.ndarray, "tokens"]
    offsets: Int[np.ndarray, "tokens 2"]
    """Start and end of each token in `text`, in characters."""
    positions: Int[np.ndarray, "rendered_and_one"]
    """Place in `text` of each character of the text that was rendered, and of its end."""


@functools.lru_cache(maxsize=8)
def _index_spellings(special_tokens: tuple[str, ...]) -> _Spellings:
    replacements = {token: chr(_FIRST_WRITTEN + number) for number, token in enumerate(special_tokens) if token}
    private = re.escape("".join(replacements.values()) + _LITERAL)
    ordered = sorted(replacements, key=len, reverse=True)  # the longest match wins
    return _Spellings(
        replacements,
        re.compile("|".join([*map(re.escape, ordered), f"[{private}]"])),
        re.compile(f"{_LITERAL}.|[{private}]", re.DOTALL),
        frozenset(token[:length] for token in replacements for length in range(1, len(token))),
        frozenset(token[0] for token in replacements),
        max(map(len, replacements), default=0),
    )


@functools.lru_cache(maxsize=8)
def _index_special_tokens(
    spellings: tuple[str, ...], tokens: tuple[int, ...]
) -> tuple[dict[int, str], Bool[np.ndarray, "ids"]]:
    """Return the spelling of each special token, and a table by id. Its last entry, False, is of all later ids."""
    is_special = np.zeros(max(tokens, default=-1) + 2, bool)
    is_special[list(tokens)] = True
    return dict(zip(tokens, spellings, strict=True)), is_special


def _find_special(tokens: Int[np.ndarray, "tokens"], is_special: Bool[np.ndarray, "ids"]) -> Int[np.ndarray, "found"]:
    """Return the places of special tokens."""
    return np.flatnonzero(is_special[np.minimum(tokens, len(is_special) - 1)])


def _protect_value(value: Any, spellings: _Spellings) -> Any:
    """Protect all texts within a value. Names that a template asks for stay: of fields, roles and types."""
    if not spellings.replacements:
        return value
    if isinstance(value, (dict, Mapping)):  # a dict is found sooner than a Mapping
        changed = {}
        for key, item in value.items():
            is_name = key in _NAME_FIELDS and isinstance(item, str) and item.isidentifier()
            name = key if not isinstance(key, str) or key.isidentifier() else spellings.protect(key)
            changed[name] = item if is_name else _protect_value(item, spellings)
        return changed
    if isinstance(value, list | tuple):
        return [_protect_value(item, spellings) for item in value]
    return map_texts(value, spellings.protect)


def encode_text(text: str, tokenizer: Tokenizer) -> SpelledText:
    """Tokenize a rendered text that `protect` has been through."""
    special = tokenizer.special_tokens
    tokens, offsets = tokenizer.encode_with_offsets(text)
    spellings = _index_spellings(tuple(special))
    names, is_special = _index_special_tokens(tuple(special), tuple(special.values()))
    found = _find_special(tokens, is_special)
    # A token may take the spaces around it. The text of other special tokens is a character that is unknown, or letters
    # of a message that a normalizer turns into one.
    of_template = [i for i in found.tolist() if text[slice(*offsets[i])].strip() == names[int(tokens[i])].strip()]
    if len(of_template) == len(found) and not spellings.written.search(text):
        return SpelledText(text, tokens, offsets, np.arange(len(text) + 1))

    final, positions = _write_spellings(text, spellings, tuple(special))
    pieces = []
    start = begin = 0  # first character and first token after the last special token of the template
    for i in [*of_template, len(tokens)]:
        stop = int(offsets[i, 0]) if i < len(tokens) else len(text)
        piece = tokens[begin:i], positions[offsets[begin:i]]
        is_written = spellings.written.search(text, start, stop) is not None
        others = len(_find_special(piece[0], is_special))
        if is_written or others:
            plain = _encode_plain(final, int(positions[start]), int(positions[stop]), tokenizer)
            if is_written or others != len(_find_special(plain[0], is_special)):  # else they are unknown characters
                piece = plain
        pieces.append(piece)
        if i < len(tokens):
            pieces.append((tokens[i : i + 1], positions[offsets[i : i + 1]]))
            start = int(offsets[i, 1])
            begin = i + 1
    all_tokens, all_offsets = zip(*pieces, strict=True)
    return SpelledText(final, np.concatenate(all_tokens), np.concatenate(all_offsets), positions)


def _write_spellings(
    text: str, spellings: _Spellings, special_tokens: Sequence[str]
) -> tuple[str, Int[np.ndarray, "rendered_and_one"]]:
    """Write special tokens that messages spell as text; return the place of each character in it, too."""
    widths = np.ones(len(text), np.int64)
    for found in spellings.written.finditer(text):
        widths[found.start() : found.end()] = 0
        widths[found.start()] = len(spellings.spell(found[0], special_tokens))
    final = spellings.written.sub(lambda found: spellings.spell(found[0], special_tokens), text)
    return final, np.concatenate([[0], np.cumsum(widths)])


def _encode_plain(
    text: str, start: int, stop: int, tokenizer: Tokenizer
) -> tuple[Int[np.ndarray, "tokens"], Int[np.ndarray, "tokens 2"]]:
    """Tokenize the characters from `start` to `stop` as plain text. **Raises** `ChatError` if that gives a special
    token."""
    piece = text[start:stop]
    tokens, offsets = tokenizer.encode_with_offsets(piece, find_special_tokens=False)
    if start and _begins_a_text_otherwise(tokenizer):
        # Behind another character a tokenizer does not write the space that begins a text.
        line_end, _ = tokenizer.encode_with_offsets("\n", find_special_tokens=False)
        behind, at = tokenizer.encode_with_offsets("\n" + piece, find_special_tokens=False)
        if np.array_equal(behind[: len(line_end)], line_end):
            tokens = behind[len(line_end) :]
            offsets = np.maximum(at[len(line_end) :] - 1, 0)
    for spelling, token in tokenizer.special_tokens.items():
        for i in np.flatnonzero(tokens == token):
            if piece[slice(*offsets[i])] == spelling:
                raise ChatError(
                    f"a message has {spelling!r}, which this tokenizer can only write as the special token {token}: "
                    "leave it out of the text"
                )
    return tokens, offsets + start


def _begins_a_text_otherwise(tokenizer: Tokenizer) -> bool:
    """Return True if a tokenizer begins a text with a space, and goes on after a special token without one."""
    (special, *_) = tokenizer.special_tokens
    behind, _ = tokenizer.encode_with_offsets(special + "b")
    first, _ = tokenizer.encode_with_offsets("b", find_special_tokens=False)
    return not np.array_equal(behind[1:], first)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply a function to the texts within lists and mappings, keys excepted."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, (dict, Mapping)):  # a dict is found sooner than a Mapping
        return {key: map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(item, change) for item in value]
    return value
