"""Chat templates: the Jinja program of a checkpoint that turns messages into the text that its model was trained on.

    template = ChatTemplate.read(directory)
    messages = [{"role": "user", "content": "What is a pytree?"}]
    tokens = template.encode(messages, tokenizer, add_generation_prompt=True)

Templates are rendered as transformers 5.24 renders them, in Jinja's sandbox. Special tokens that a message spells are
plain text: no user ends the turn of another by typing `<|im_end|>`.
"""

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from jaxtyping import Int

from zoo._files import JSON_BYTES, read_limited
from zoo._optional import import_optional

from .tokenizers import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
_TOKENIZER_CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates ask for the same field."""
_OPEN, _CLOSE, _CONTINUE = "\ufdd0", "\ufdd1", "\ufdd2"
"""Noncharacters, which no text for interchange contains: around what the assistant generates, and where it goes on."""
_FIRST_WRITTEN = 0xF0000
"""First of the private characters that stand for special tokens which a message spells."""


class ChatError(ValueError):
    """Raised for a chat template that is missing or damaged, and for messages that it refuses."""


class NoChatTemplateError(ChatError):
    """Raised for a checkpoint directory without a chat template."""


class RenderedChat(NamedTuple):
    """The text of a conversation."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """Start and end, in characters, of what the template marks by `{% generation %}`: the assistant's words."""


class ChatTemplate:
    """A chat template: messages to text, and to tokens.

    - `source`: the Jinja program.
    - `special_tokens`: variables of the template such as `bos_token`.
    - `name`: names the template in messages of errors.

    **Raises** `ImportError` without the package `jinja2`; `ChatError` for a program that Jinja cannot read.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] = {}, *, name: str = "the chat template"):
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._name = name
        environment = _make_environment()
        try:
            self._template = environment.from_string(source)
        except Exception as error:
            raise ChatError(f"{name} is not a Jinja template: {error}") from None

    @classmethod
    def read(cls, directory: str | Path, name: str = "default") -> "ChatTemplate":
        """Read the chat template of a checkpoint directory: `chat_template.jinja`, else the key `chat_template` of
        tokenizer_config.json, where several may have a `name`.

        **Raises** `NoChatTemplateError` for a directory without one, and `ChatError` for a name that it does not have.
        """
        directory = Path(directory)
        config = _read_tokenizer_config(directory)
        if (directory / TEMPLATE_FILE).exists():
            location = directory / TEMPLATE_FILE
            source = _read(location).decode()
        else:
            location = directory / _TOKENIZER_CONFIG_FILES[0]
            source = config.get("chat_template")
        if isinstance(source, list):
            named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
            if name not in named:
                raise ChatError(f"{location} has the chat templates {', '.join(map(str, named))}, and not {name!r}")
            source = named[name]
        if not isinstance(source, str):
            raise NoChatTemplateError(
                f"{directory} has no chat template: neither {TEMPLATE_FILE} nor one in {location.name}"
            )
        return cls(source, find_special_tokens(config), name=str(location))

    @property
    def marks_generation(self) -> bool:
        """True if the template marks the assistant's words by `{% generation %}`."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> RenderedChat:
        """Return the text of a conversation, as `apply_chat_template(tokenize=False)` of transformers does.

        - `messages`: mappings with a "role" and a "content"; keys whose value is None are left out.
        - `tools`: JSON schemas of functions that the model may call.
        - `add_generation_prompt`: end with the beginning of an answer.
        - `continue_final_message`: end within the last message, which the model goes on with.
        - `variables`: further variables of the template, such as `enable_thinking`.

        **Raises** `ChatError` for messages that the template refuses.
        """
        prepared = [_alias_reasoning(message) for message in messages]
        if continue_final_message:
            if add_generation_prompt or not prepared:
                raise ChatError("a final message is continued, or another one begun: pass messages and one of the two")
            # The space shows whether the template strips what it is given.
            prepared[-1] = prepared[-1] | {"content": prepared[-1].get("content", "") + _CONTINUE + " "}
        known = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            marked = self._template.render(messages=prepared, **known, **self.special_tokens, **variables)
        except Exception as error:  # a template is a program: whatever it does is about these messages
            raise ChatError(f"{self._name} does not render these messages: {error}") from None
        if continue_final_message:
            marked, mark, rest = marked.rpartition(_CONTINUE)
            if not mark:
                raise ChatError(f"{self._name} drops the text that is to be continued")
            marked = marked if rest.startswith(" ") else marked.rstrip()
        return _take_spans(marked)

    def encode(
        self, messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, **options: Any
    ) -> Int[np.ndarray, "tokens"]:
        """Return the tokens of a conversation. `options` are those of `render`. Only the template makes special tokens:
        what a message spells like one is tokenized as text."""
        protected = protect(messages, tokenizer.special_tokens)
        return encode_rendered(self.render(protected, **options).text, tokenizer)


def protect(messages: Iterable[Mapping[str, Any]], special_tokens: Iterable[str]) -> list[dict[str, Any]]:
    """Replace special tokens that messages spell by private characters, which `encode_rendered` writes as text."""
    replacements = {token: chr(_FIRST_WRITTEN + number) for number, token in enumerate(special_tokens)}
    pattern = _match_any(replacements)

    def write(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda found: replacements[found[0]], value)
        if isinstance(value, Mapping):
            return {key: write(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [write(item) for item in value]
        return value

    if not replacements:
        return [dict(message) for message in messages]
    return [{key: value if key == "role" else write(value) for key, value in each.items()} for each in messages]


def encode_rendered(text: str, tokenizer: Tokenizer) -> Int[np.ndarray, "tokens"]:
    """Tokenize a rendered conversation, in which `protect` has replaced special tokens that are text.

    Text without any is tokenized as a whole, as transformers does; else piece by piece between the special tokens.
    """
    special = tokenizer.special_tokens
    spellings = {chr(_FIRST_WRITTEN + number): token for number, token in enumerate(special)}
    written = _match_any(spellings)
    if not special or not written.search(text):
        return tokenizer.encode(text)
    pieces = [np.zeros(0, np.int64)]
    for piece in re.split(f"({_match_any(special).pattern})", text):
        if piece in special:
            pieces.append(np.array([special[piece]], np.int64))
        elif piece:
            plain = written.sub(lambda found: spellings[found[0]], piece)
            pieces.extend(tokenizer.encode_all([plain.encode()]))
    return np.concatenate(pieces)


def find_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a tokenizer_config.json by name, `{"bos_token": "<s>"}`."""
    found = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def _match_any(words: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of all words, the longest first; one that matches nothing without words."""
    ordered = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def _take_spans(marked: str) -> RenderedChat:
    """Take the marks around the assistant's words out of a text."""
    text = ""
    spans = []
    start = 0
    for part in re.split(f"([{_OPEN}{_CLOSE}])", marked):
        if part == _OPEN:
            start = len(text)
        elif part == _CLOSE:
            spans.append((start, len(text)))
        else:
            text += part
    return RenderedChat(text, tuple(spans))


def _alias_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Drop keys that are None, and give a message's reasoning all names that templates use for it."""
    message = {key: value for key, value in message.items() if value is not None}
    for name in _REASONING:
        if name in message:
            return {"thinking": message[name], **message, "reasoning_content": message[name]}
    return message


def _read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """Return tokenizer_config.json on top of special_tokens_map.json, which older checkpoints have."""
    merged: dict[str, Any] = {}
    for name in reversed(_TOKENIZER_CONFIG_FILES):
        path = directory / name
        if not path.exists():
            continue
        try:
            config = json.loads(_read(path))
        except ValueError as error:
            raise ChatError(f"{path} cannot be read: {error}") from None
        if not isinstance(config, dict):
            raise ChatError(f"{path} is not a JSON object")
        merged |= {key: value for key, value in config.items() if value is not None}
    return merged


def _read(path: Path) -> bytes:
    try:
        return read_limited(path, JSON_BYTES)
    except (OSError, ValueError) as error:
        raise ChatError(f"{path} cannot be read: {error}") from None


def _make_environment() -> Any:
    """Return the Jinja environment that chat templates are written for."""
    jinja2 = import_optional("jinja2", "pip install 'equizoo[text]'")
    sandbox = import_optional("jinja2.sandbox", "pip install 'equizoo[text]'")
    extensions = import_optional("jinja2.ext", "pip install 'equizoo[text]'")

    class Generation(extensions.Extension):
        """`{% generation %}...{% endgeneration %}`: its text, between two marks."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Any) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, extensions.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _format_now
    return environment


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, and sorts keys."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _format_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
