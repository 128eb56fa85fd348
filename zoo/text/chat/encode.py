"""Conversations to tokens, and which of them are trained on. Only the template makes special tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from ..tokenizers import Tokenizer
from .errors import ChatError
from .spans import find_end, mark_all_turns, mark_last_turn
from .special_tokens import encode_text, protect, protect_options
from .template import ChatTemplate


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
        text = encode_text(chat.text, tokenizer)
        if is_changed and text.text != template.render(messages[:length], **given).text:
            raise ChatError(f"{template.name} changes special tokens that a message spells, and then they are not text")
        mask = _find_overlaps(text.offsets, text.positions[np.array(chat.spans, np.int64).reshape(-1, 2)])
        if not mask.any():
            raise ChatError(f"{template.name} marks no token of this conversation as written by the assistant")
        encoded.append(EncodedText(text.tokens, mask))
    return encoded


def encode_spans(text: str, spans: Sequence[tuple[int, int]], tokenizer: Tokenizer) -> EncodedText:
    """Tokenize a text that `protect` has been through, to train on the tokens that overlap one of `spans`, in
    characters of it. **Raises** as `encode_rendered` does."""
    encoded = encode_text(text, tokenizer)
    mask = _find_overlaps(encoded.offsets, encoded.positions[np.array(spans, np.int64).reshape(-1, 2)])
    return EncodedText(encoded.tokens, mask)


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
