"""Conversations to tokens, and which of them are trained on. Only the template makes special tokens."""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from ..tokenizers import Tokenizer
from .spans import find_end, mark_all_turns, mark_last_turn
from .template import ChatError, ChatTemplate, map_texts

_FIRST_WRITTEN = 0xF0000
"""First of the private characters that stand for special tokens which a message spells."""
_LITERAL = "\U0010fffd"
"""Private character before a character that stands for itself."""
_NAME_FIELDS = ("role", "type")
"""Fields that templates compare with names of their own."""


class EncodedText(NamedTuple):
    """Tokens of a text, and which of them the model is to predict."""

    tokens: Int[np.ndarray, "tokens"]
    mask: Bool[np.ndarray, "tokens"]
    """True where the token is trained on."""


def encode_conversation(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    train_on: Literal["all", "last"] = "all",
    first: int = 0,
    **variables: Any,
) -> list[EncodedText]:
    """Return the tokens of a conversation, trained on where the assistant wrote them.

    A token is trained on if it overlaps a span of the assistant: what the template marks by `{% generation %}`, else
    what follows the generation prompt, up to and with the special token that ends the turn.

    - `tools`: JSON schemas of functions that the model may call.
    - `train_on`: "all" returns one text, with every turn of the assistant. "last" returns one text per turn of the
      assistant: the messages up to and with this turn, in their own rendering, trained on there only. Templates that
      drop the reasoning of earlier turns need it.
    - `first`: turns before `messages[first]` are not trained on.
    - `variables`: further variables of the template, such as `enable_thinking`.

    **Raises** `ChatError` for messages that the template refuses; without a turn or a token to train on; for a template
    without marks that changes earlier turns later; and for a special token in a message that cannot be text.
    """
    _check_arguments(messages, train_on, first, variables)
    turns = [number for number, message in enumerate(messages) if number >= first and message["role"] == "assistant"]
    if not turns:
        behind = f" from message {first} on" if first else ""
        raise ChatError(f"a conversation to train on has an answer of the assistant, and this one has none{behind}")
    special = tokenizer.special_tokens
    protected = protect(messages, special)
    given = {"tools": tools, **variables}
    options = protect_options(given, special)
    if train_on == "all":
        lengths = [len(messages)]
        chats = [mark_all_turns(template, protected, special, first=first, **options)]
    else:
        lengths = [turn + 1 for turn in turns]
        chats = [mark_last_turn(template, protected[:length], special, **options) for length in lengths]
    is_changed = protected != list(messages) or options != given
    encoded = []
    for length, chat in zip(lengths, chats, strict=True):
        text = _encode_text(chat.text, tokenizer)
        if is_changed and text.text != template.render(messages[:length], **given).text:
            raise ChatError(f"{template.name} changes special tokens that a message spells, and then they are not text")
        mask = _find_overlaps(text.offsets, text.positions[np.array(chat.spans, np.int64).reshape(-1, 2)])
        if not mask.any():
            raise ChatError(f"{template.name} marks no token of this conversation as written by the assistant")
        encoded.append(EncodedText(text.tokens, mask))
    return encoded


def find_end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Return the special token that ends an assistant's turn as it is trained on, None without one.

    **Raises** `ChatError` for a template that refuses a question and its answer, or that has no marks and does not
    write the answer after the generation prompt.
    """
    probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    if template.marks_generation:
        text, spans = mark_all_turns(template, probe, tokenizer.special_tokens)
    else:
        text, spans = mark_last_turn(template, probe, tokenizer.special_tokens)
    written = "".join(text[start:stop] for start, stop in spans)
    ended = written[: find_end(written, tokenizer.special_tokens)]
    ends = [token for token in tokenizer.special_tokens if token and ended.endswith(token)]
    if not ends:
        return None
    return tokenizer.special_tokens[max(ends, key=len)]


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
    return _encode_text(text, tokenizer).tokens


def encode_spans(text: str, spans: Sequence[tuple[int, int]], tokenizer: Tokenizer) -> EncodedText:
    """Tokenize a text that `protect` has been through, to train on the tokens that overlap one of `spans`, in
    characters of it. **Raises** as `encode_rendered` does."""
    encoded = _encode_text(text, tokenizer)
    mask = _find_overlaps(encoded.offsets, encoded.positions[np.array(spans, np.int64).reshape(-1, 2)])
    return EncodedText(encoded.tokens, mask)


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


class _Text(NamedTuple):
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


def _encode_text(text: str, tokenizer: Tokenizer) -> _Text:
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
        return _Text(text, tokens, offsets, np.arange(len(text) + 1))

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
    return _Text(final, np.concatenate(all_tokens), np.concatenate(all_offsets), positions)


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


def _find_overlaps(
    offsets: Int[np.ndarray, "tokens 2"], spans: Int[np.ndarray, "spans 2"]
) -> Bool[np.ndarray, "tokens"]:
    """Return True for each token that has a character in a span."""
    mask = np.zeros(len(offsets), bool)
    for start, stop in spans:
        mask |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
    return mask


def _check_arguments(
    messages: Sequence[Mapping[str, Any]], train_on: str, first: int, variables: Mapping[str, Any]
) -> None:
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatError(f'message {number} is not an object with a text as "role", but {str(message)[:100]!r}')
    if train_on not in ("all", "last"):
        raise ValueError(f'train_on is "all" or "last", not {train_on!r}')
    if first < 0:
        raise ValueError(f"first is the number of a message, from 0 on, not {first}")
    if taken := {"add_generation_prompt", "continue_final_message"} & variables.keys():
        raise ValueError(f"{min(taken)} makes a prompt, and a conversation to train on ends with its last message")
