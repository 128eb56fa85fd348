"""Kinds of records: the fields that each has, and the tokens that it becomes.

| kind | fields | trained on |
|---|---|---|
| text | `text`, or the field that `field` names | all of it |
| chat | `messages`, optionally `tools` | what the assistant writes |
| completion | `prompt` and `completion`, both text or both messages | the completion |
| preference | `chosen` and `rejected`, with a `prompt` or a common beginning | both answers |
| labeled | as completion, and a `label` | the completion |
| prompts | `prompt`, and any other fields | nothing: a model completes them |
| pair | `source` and `target`, both text | the target, by a model with an encoder |

All but the last are the fields that TRL's trainers read. The first record decides the kind, `find_kind`; a later record
without its fields is a fault.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Integer

from zoo.images.placeholders import find_placeholder
from zoo.text.chat.encode import EncodedText, encode_conversation, encode_spans
from zoo.text.chat.errors import ChatError
from zoo.text.chat.special_tokens import protect
from zoo.text.chat.template import ChatTemplate
from zoo.text.packing import TooLong
from zoo.text.tokenizers import Tokenizer, encode_utf8

from .pictures import Parts, PictureTemplate, PlacedPicture, list_pictures
from .record_file import RecordError

_LARGEST_LABEL = float(np.finfo(np.float32).max)
_Record = Mapping[str, Any]
_ROLES = ("system", "developer", "user", "assistant", "tool")
_OTHER_FORMATS = {
    "conversations": (
        "`conversations` of `from` and `value` (ShareGPT): write `messages` of `role`, one of system, user and "
        "assistant, and `content`"
    ),
    "instruction": "`instruction`, `input` and `output` (Alpaca): write a `prompt` and a `completion`",
    "translation": "`translation`, by languages: write a `source` and a `target`",
    "question": "`question` and an answer: write a `prompt` and a `completion`",
}
"""First fields of formats that are not read, and what to write instead."""


_PARTS = "only text is read, and images with images=zoo.images.read_image_config(directory)"
NO_TEMPLATE = "messages need a chat template, and the model has none: pass one (--chat-template FILE)"


class Item(NamedTuple):
    """A unit of data: a text, or several that stay together in a row."""

    texts: tuple[EncodedText, ...]
    label: float = 0.0
    fields: dict[str, Any] | None = None
    """Further fields of a prompt."""
    pictures: tuple[PlacedPicture, ...] = ()


@dataclass(frozen=True)
class Encoding:
    """Tokenizer, chat template and options that turn records into tokens.

    - `text_field`: the field of plain text.
    - `train_on`: every answer of a chat, or only the last of each rendering; a chat of n answers then is n texts.
    - `variables`: further variables of the template, such as `enable_thinking`.
    - `images`: the config of an image processor, of messages with images.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    text_field: str
    train_on: Literal["all", "last"]
    variables: Mapping[str, Any]
    images: Mapping[str, Any] | None = None

    def encode_messages(self, messages: Sequence[_Record], **options: Any) -> list[EncodedText]:
        """Encode a conversation by the chat template. **Raises** `RecordError` without one."""
        template: Any = self._get_template()
        if self.images is not None:
            template = PictureTemplate(template, find_placeholder(self.images))
        return encode_conversation(template, messages, self.tokenizer, **options, **self.variables)

    def encode_prompt(self, messages: Sequence[_Record], tools: Sequence[_Record] | None = None) -> EncodedText:
        """Encode a conversation up to the beginning of the next answer. **Raises** `RecordError` without a template."""
        options = {"tools": tools, "add_generation_prompt": True, **self.variables}
        tokens = self._get_template().encode(messages, self.tokenizer, **options)
        return EncodedText(tokens, np.zeros(len(tokens), bool))

    def encode_texts(self, texts: Iterable[bytes]) -> Iterator[Integer[np.ndarray, "tokens"]]:
        """Yield separator and tokens of each text."""
        for tokens in self.tokenizer.encode_all(texts):
            yield np.append(self.tokenizer.separator, tokens)

    def encode_completion(self, prompt: str, completion: str) -> EncodedText:
        """Encode separator, prompt, completion and end; the latter two are trained on."""
        (written,) = protect([{"prompt": prompt, "completion": completion}], self.tokenizer.special_tokens)
        text = written["prompt"] + written["completion"]
        encoded = encode_spans(text, [(len(written["prompt"]), len(text))], self.tokenizer)
        tokens = np.concatenate([[self.tokenizer.separator], encoded.tokens, [self.tokenizer.end]])
        return EncodedText(tokens, np.concatenate([[False], encoded.mask, [True]]))

    def encode_pair(self, source: str, target: str) -> tuple[EncodedText, EncodedText]:
        """Encode a source as its encoder reads it, and a target with its end."""
        tokenizer = self.tokenizer
        encoded = tokenizer.encode_all([source.encode(), target.encode()])
        parts = (tokenizer.prefix, tokenizer.suffix), ((), (tokenizer.end,))
        texts = (np.array([*before, *x, *after]) for x, (before, after) in zip(encoded, parts, strict=True))
        first, second = (EncodedText(tokens, np.ones(len(tokens), bool)) for tokens in texts)
        return first, second

    def _get_template(self) -> ChatTemplate:
        if self.template is None:
            raise RecordError(NO_TEMPLATE)
        return self.template


class RecordKind:
    """Base of the kinds of records: checks and encodes them."""

    name: ClassVar[str]
    fields: ClassVar[str]
    """Its fields, in words."""
    texts_per_item: ClassVar[int] = 1
    too_long: ClassVar[TooLong] = "drop"
    """By default, what happens to texts longer than a row: half an answer would teach a model not to end."""
    is_labeled: ClassVar[bool] = False
    has_fields: ClassVar[bool] = False
    """True if further fields are kept with each item."""

    @property
    def noun(self) -> str:
        """One record, in words."""
        return f"{self.name.removesuffix('s')} record"

    def encode(self, record: _Record, encoding: Encoding) -> list[Item]:
        """Return the items of a record. **Raises** `RecordError` or `ChatError` for a fault in it."""
        raise NotImplementedError

    def has_messages(self, record: _Record) -> bool:
        """Return True for a record of messages, which a chat template renders; False for one of text."""
        return isinstance(record.get("prompt"), list)

    def find_key(self, record: _Record, encoding: Encoding) -> str:
        """Return the text of a checked record by which it is held out or not: equal prompts stay together."""
        raise NotImplementedError

    def encode_all(self, records: Iterable[_Record], encoding: Encoding) -> Iterator[list[Item] | RecordError]:
        """Yield the items, or the fault, of each record."""
        for record in records:
            try:
                items = self.encode(record, encoding)
            except (RecordError, ChatError) as error:
                yield RecordError(str(error))
            else:
                yield _find_fault(items, encoding.tokenizer.vocab, is_trained=not self.has_fields) or items


class TextKind(RecordKind):
    """Plain text, all of which is trained on."""

    name = "text"
    fields = "`text`, or the field that `field` (--field) names"
    too_long = "cut"

    def encode_all(self, records: Iterable[_Record], encoding: Encoding) -> Iterator[list[Item] | RecordError]:
        found: list[bytes | RecordError] = []
        for record in records:
            try:
                found.append(_get(record, encoding.text_field, str, self).encode())
            except RecordError as error:
                found.append(error)
        texts = encoding.encode_texts(text for text in found if isinstance(text, bytes))  # in batches
        for text in found:
            if isinstance(text, RecordError):
                yield text
                continue
            tokens = next(texts)
            items = [Item((EncodedText(tokens, np.arange(len(tokens)) > 0),))]
            fault = _find_separator(tokens) or _find_fault(items, encoding.tokenizer.vocab, is_trained=True)
            yield fault or items

    def has_messages(self, record: _Record) -> bool:
        return False

    def find_key(self, record: _Record, encoding: Encoding) -> str:
        return record[encoding.text_field]


class ChatKind(RecordKind):
    """Conversations, of which the assistant's turns are trained on."""

    name = "chat"
    fields = "`messages`, a list of `role` and `content`, and optionally `tools`"

    def encode(self, record: _Record, encoding: Encoding) -> list[Item]:
        messages = _get_messages(record, "messages", self)
        options = {"tools": _get_tools(record, self), "train_on": encoding.train_on}
        texts = encoding.encode_messages(messages, **options)
        ends = [len(messages)]
        if encoding.train_on == "last":
            ends = [number for number, message in enumerate(messages, 1) if message["role"] == "assistant"]
        pictures = [tuple(list_pictures(messages[:end])) for end in ends]
        return [Item((text,), pictures=each) for text, each in zip(texts, pictures, strict=True)]

    def has_messages(self, record: _Record) -> bool:
        return True

    def find_key(self, record: _Record, encoding: Encoding) -> str:
        return _find_question(record["messages"])


class CompletionKind(RecordKind):
    """Prompts with a completion, which is trained on."""

    name = "completion"
    fields = "`prompt` and `completion`, both text or both messages"

    def encode(self, record: _Record, encoding: Encoding) -> list[Item]:
        prompt = _get(record, "prompt", str | list, self)
        text = _encode_answer(record, prompt, "completion", encoding, self)
        messages = [*prompt, *record["completion"]] if isinstance(prompt, list) else []
        return [Item((text,), pictures=tuple(list_pictures(messages)))]

    def find_key(self, record: _Record, encoding: Encoding) -> str:
        return _find_question(record["prompt"] or record["completion"])


class LabeledKind(CompletionKind):
    """Prompts with a completion and a label of it."""

    name = "labeled"
    fields = "`prompt` and `completion`, both text or both messages, and `label`, a number or true or false"
    is_labeled = True

    def encode(self, record: _Record, encoding: Encoding) -> list[Item]:
        label = _get(record, "label", bool | int | float, self)
        if not abs(label) <= _LARGEST_LABEL:
            raise RecordError(f"`label` is {_to_phrase(label)}: expected a number of float32")
        (item,) = super().encode(record, encoding)
        return [item._replace(label=float(label))]


class PreferenceKind(RecordKind):
    """Prompts with two answers, of which the first is preferred. Both are texts of one item."""

    name = "preference"
    fields = "`chosen` and `rejected`, both text or both messages, with a `prompt` or a common beginning"
    texts_per_item = 2

    def encode(self, record: _Record, encoding: Encoding) -> list[Item]:
        chosen = _get(record, "chosen", str | list, self)
        rejected = _get(record, "rejected", type(chosen), self)
        if chosen == rejected:
            raise RecordError("`chosen` and `rejected` are equal: there is nothing to prefer")
        record = _split_prompt(record)
        prompt = _get(record, "prompt", type(chosen), self)
        texts = [_encode_answer(record, prompt, name, encoding, self) for name in ("chosen", "rejected")]
        return [Item(tuple(texts))]

    def has_messages(self, record: _Record) -> bool:
        return isinstance(record.get("chosen"), list)

    def find_key(self, record: _Record, encoding: Encoding) -> str:
        return _find_question(_split_prompt(record)["prompt"])


class PromptKind(RecordKind):
    """Prompts to complete, with further fields for a reward function."""

    name = "prompts"
    fields = "`prompt`, text or messages, and any other fields"
    has_fields = True

    def encode(self, record: _Record, encoding: Encoding) -> list[Item]:
        prompt = _get(record, "prompt", str | list, self)
        if isinstance(prompt, str):
            (tokens,) = encoding.encode_texts([prompt.encode()])
            if fault := _find_separator(tokens):
                raise fault
            text = EncodedText(tokens, np.zeros(len(tokens), bool))
        else:
            text = encoding.encode_prompt(_get_messages(record, "prompt", self), _get_tools(record, self))
        return [Item((text,), fields={name: value for name, value in record.items() if name != "prompt"})]

    def find_key(self, record: _Record, encoding: Encoding) -> str:
        return _find_question(record["prompt"])


class PairKind(RecordKind):
    """Sources with a target, which a decoder writes of what an encoder reads."""

    name = "pair"
    fields = "`source` and `target`, both text"
    texts_per_item = 2

    def encode(self, record: _Record, encoding: Encoding) -> list[Item]:
        source, target = (_get(record, name, str, self) for name in ("source", "target"))
        for name, text in {"source": source, "target": target}.items():
            if not text:
                raise RecordError(f"`{name}` is empty: a pair has text in both")
        return [Item(encoding.encode_pair(source, target))]

    def has_messages(self, record: _Record) -> bool:
        return False

    def find_key(self, record: _Record, encoding: Encoding) -> str:
        return record["source"]


KINDS: dict[str, RecordKind] = {
    kind.name: kind
    for kind in (TextKind(), ChatKind(), CompletionKind(), PreferenceKind(), LabeledKind(), PromptKind(), PairKind())
}


def find_kind(record: _Record, text_field: str = "text") -> RecordKind:
    """Return the kind of a record by its fields. **Raises** `RecordError` for fields that are of no kind."""
    names = set(record)
    if {"chosen", "rejected"} <= names:
        return KINDS["preference"]
    if "messages" in names:
        return KINDS["chat"]
    if "source" in names or "target" in names:
        return KINDS["pair"]
    if {"prompt", "completion", "label"} <= names:
        return KINDS["labeled"]
    if {"prompt", "completion"} <= names:
        return KINDS["completion"]
    if "prompt" in names:
        return KINDS["prompts"]
    if text_field in names:
        return KINDS["text"]
    for name, advice in _OTHER_FORMATS.items():
        if name in names:
            raise RecordError(f"the record has {advice}")
    known = "; ".join(f"{kind.name}: {kind.fields}" for kind in KINDS.values())
    raise RecordError(f"the record has the fields {_quote(record)}, which are of no kind. Kinds are {known}")


def _encode_answer(record: _Record, prompt: str | list, name: str, encoding: Encoding, kind: RecordKind) -> EncodedText:
    """Encode a prompt and the answer in the field `name`, which is trained on."""
    answer = _get(record, name, type(prompt), kind)
    if not answer:
        raise RecordError(f"`{name}` is empty: there is nothing to train on")
    if isinstance(prompt, str):
        return encoding.encode_completion(prompt, answer)
    asked = _get_messages({"prompt": prompt}, "prompt", kind)
    messages = [*asked, *_get_messages(record, name, kind)]
    (text,) = encoding.encode_messages(messages, tools=_get_tools(record, kind), first=len(asked))
    return text


def _get(record: _Record, name: str, expected: Any, kind: RecordKind) -> Any:
    """Return a field. **Raises** `RecordError` if it is missing or has another type."""
    if name not in record:
        raise RecordError(
            f"`{name}` is missing: a record of the kind {kind.name} has {kind.fields}, and this one has "
            f"{_quote(record)}"
        )
    value = record[name]
    if not isinstance(value, expected):
        came = _name_types(type(value))
        types = _name_types(*getattr(expected, "__args__", (expected,)))
        raise RecordError(f"`{name}` is {came}, expected {types}: {_to_phrase(value)}")
    if isinstance(value, str):
        _check_unicode(value, f"`{name}`")
    return value


def _check_unicode(text: str, name: str) -> None:
    try:
        encode_utf8(text, name)
    except ValueError as error:
        raise RecordError(str(error)) from None


def _get_messages(record: _Record, name: str, kind: RecordKind) -> list[dict[str, Any]]:
    """Return a list of messages. **Raises** `RecordError` for what is not one, and for unknown roles."""
    messages = _get(record, name, list, kind)
    if not messages:
        raise RecordError(f"`{name}` is empty: expected a list of messages")
    for number, message in enumerate(messages):
        where = f"`{name}`[{number}]"
        if not isinstance(message, dict):
            came = _name_types(type(message))
            raise RecordError(f"{where} is {came}: expected a message with `role` and `content`")
        role = message.get("role")
        if role not in _ROLES:
            raise RecordError(f"{where} has the role {_to_phrase(role)}: expected one of {', '.join(_ROLES)}")
        content = message.get("content")
        if isinstance(content, list) and not isinstance(content, Parts):
            raise RecordError(f"{where} has a list of parts as `content`: {_PARTS}")
        if not isinstance(content, str | Parts) and not (content is None and message.get("tool_calls")):
            raise RecordError(f"{where} has {_name_types(type(content))} as `content`: expected text")
        texts = [part.get("text", "") for part in content] if isinstance(content, Parts) else [content or ""]
        for text in texts:
            _check_unicode(text, where)
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
            raise RecordError(f"{where} has {_to_phrase(calls)} as `tool_calls`: expected a list of objects")
    return messages


def _get_tools(record: _Record, kind: RecordKind) -> list[dict[str, Any]] | None:
    """Return the tools of a record, which tables may hold as JSON text: their schemas have no fields in common."""
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            parsed = json.loads(tools)
        except ValueError:
            parsed = tools
        if not isinstance(parsed, list):
            raise RecordError(f"`tools` is text, expected a list, or its JSON: {_to_phrase(tools)}")
        return parsed
    if tools is None:
        return None
    return _get(record, "tools", list, kind)


def _find_separator(tokens: Integer[np.ndarray, "tokens"]) -> RecordError | None:
    """Return the fault of a text after a separator that spells another one: it would be two texts."""
    if (tokens[1:] == tokens[0]).any():
        return RecordError(f"the text spells the separator, token {tokens[0]}, which the tokenizer has no text for")
    return None


def _find_fault(items: Sequence[Item], vocab: int, *, is_trained: bool) -> RecordError | None:
    """Return the fault of encoded texts: an id that the model does not have, or nothing to train on."""
    for item in items:
        for tokens, mask in item.texts:
            if tokens.max(initial=0) >= vocab:
                return RecordError(f"it has the token {tokens.max()}, and the model has a vocabulary of {vocab:,}")
            if is_trained and not mask[1:].any():
                return RecordError("nothing of it is trained on: it is empty, or has no answer")
    return None


def _find_question(prompt: str | list[dict[str, Any]]) -> str:
    """Return what the first user of a conversation says."""
    if isinstance(prompt, str):
        return prompt
    said = [message for message in prompt if message["role"] == "user"] or prompt
    return str(said[0].get("content"))


def _split_prompt(record: _Record) -> _Record:
    """Return a preference with its prompt: the common beginning of both answers, if it has none, or one of text where
    the answers are messages, which then hold the question, too.

    **Raises** `RecordError` for answers without a common beginning.
    """
    chosen = record["chosen"]
    prompt = record.get("prompt")
    if prompt is not None and not (isinstance(prompt, str) and isinstance(chosen, list)):
        return record
    rejected = record["rejected"]
    shared = _count_common(chosen, rejected)
    if not shared:
        lacks = "there is no `prompt`" if prompt is None else "`prompt` is text, where they are messages"
        raise RecordError(f"`chosen` and `rejected` have no common beginning, and {lacks}")
    return {**record, "prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def _count_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the number of equal elements at the beginning of two sequences."""
    count = 0
    for mine, other in zip(first, second, strict=False):
        if mine != other:
            break
        count += 1
    return count


_TYPE_NAMES = {
    str: "text", list: "a list", dict: "an object", bool: "true or false", int: "a number", float: "a number",
    type(None): "null",
}  # fmt: skip


def _name_types(*types: type) -> str:
    """Return the names that JSON has for types: `text or a list`."""
    return " or ".join(dict.fromkeys(_TYPE_NAMES.get(kind, kind.__name__) for kind in types))


def _quote(record: _Record) -> str:
    return ", ".join(f"`{_to_phrase(name)}`" for name in list(record)[:12]) or "none"


def _to_phrase(value: Any) -> str:
    """Return a value in JSON, shortened to a phrase."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    if len(text) > 60:
        return f"{text[:60]}..."
    return text
