"""Chat templates, rendered as transformers 5.24 renders them, in Jinja's sandbox."""

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from jaxtyping import Int

from zoo._files import JSON_BYTES, read_limited
from zoo._optional import import_optional

from ..tokenizers import Tokenizer
from .errors import ChatError, NoChatTemplateError
from .special_tokens import encode_rendered, map_texts, protect, protect_options

TEMPLATE_FILE = "chat_template.jinja"
_PROCESSOR_TEMPLATE_FILE = "chat_template.json"
_TOKENIZER_CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates ask for the same field."""
_OPEN, _CLOSE, _CONTINUE, _LITERAL = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
"""Noncharacters around what the assistant generates, where it goes on, and before one of the four in a message."""
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}{_CONTINUE}{_LITERAL}]")

PLAIN_TEMPLATE = r"""
{#- A conversation in plain words, for base models without a chat template of their own. -#}
{%- if bos_token is defined -%}
    {{- bos_token -}}
{%- endif -%}
{%- for tool in tools or [] -%}
    {{- "Tool: " ~ (tool | tojson) ~ "\n\n" -}}
{%- endfor -%}
{%- for message in messages -%}
    {%- if message.role not in ["system", "user", "assistant", "tool"] -%}
        {{- raise_exception("a role is system, user, assistant or tool, not " ~ message.role) -}}
    {%- elif (message.content or "") is not string -%}
        {{- raise_exception("the content of a message is expected as one text") -}}
    {%- elif message.content is not defined and (message.role != "assistant" or not message.tool_calls) -%}
        {{- raise_exception("a message of the role " ~ message.role ~ " has no content") -}}
    {%- elif message.reasoning_content -%}
        {{- raise_exception("this chat template has no place for reasoning") -}}
    {%- elif message.role == "assistant" -%}
        {%- if eos_token is not defined -%}
            {{- raise_exception("an answer ends with eos_token, which the tokenizer does not name") -}}
        {%- endif -%}
        {{- "Assistant:\n" -}}
        {%- generation -%}
            {{- message.content -}}
            {%- for call in message.tool_calls or [] -%}
                {{- "\n" if message.content or not loop.first -}}
                {{- "Call: " ~ ((call.function or call) | tojson) -}}
            {%- endfor -%}
            {{- eos_token -}}
        {%- endgeneration -%}
        {{- "\n\n" -}}
    {%- else -%}
        {{- message.role | capitalize ~ ":\n" ~ message.content ~ "\n\n" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "Assistant:\n" -}}
{%- endif -%}
"""
"""Chat template for a base model without one: roles in words, `bos_token` first if there is one, and `eos_token` behind
each answer. Words are not special tokens: a message that spells `User:` looks like a turn."""


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
    - `date`: the day that a template writes, which asks for it by `strftime_now`; today by default.

    **Raises** `ImportError` without the package `jinja2`; `ChatError` for a program that Jinja cannot read.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] = {},
        *,
        name: str = "the chat template",
        date: datetime.date | None = None,
    ):
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.name = name
        self.date = date
        environment = _make_environment(date)
        try:
            self._template = environment.from_string(source)
        except Exception as error:
            raise ChatError(f"{name} is not a Jinja template: {error}") from None
        self._template.globals = dict(self._template.globals)  # every rendering copies them, slowly from Jinja's chain

    def __reduce__(self) -> tuple[Any, ...]:
        make = functools.partial(ChatTemplate, name=self.name, date=self.date)
        return make, (self.source, self.special_tokens)

    @classmethod
    def read(cls, directory: str | Path, name: str = "default") -> "ChatTemplate":
        """Read the chat template of a checkpoint directory: `chat_template.jinja`, else the key `chat_template` of
        tokenizer_config.json, where several may have a `name`, else that of chat_template.json, which models of images
        have.

        **Raises** `NoChatTemplateError` for a directory without one, and `ChatError` for a name that it does not have.
        """
        directory = Path(directory)
        config = _read_tokenizer_config(directory)
        if (directory / TEMPLATE_FILE).exists():
            location = directory / TEMPLATE_FILE
            source = _read_source(location)
        else:
            location = directory / _TOKENIZER_CONFIG_FILES[0]
            source = config.get("chat_template")
            if source is None and (directory / _PROCESSOR_TEMPLATE_FILE).exists():
                location = directory / _PROCESSOR_TEMPLATE_FILE
                source = _read_table(location).get("chat_template")
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
    def writes_date(self) -> bool:
        """True if the template asks for the day, and so renders other texts tomorrow."""
        return "strftime_now" in self.source

    def on_date(self, date: datetime.date) -> "ChatTemplate":
        """Return the template as it renders on a day."""
        return ChatTemplate(self.source, self.special_tokens, name=self.name, date=date)

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
        - `tools`: JSON schemas of functions that the model may call, as `tool_schema` makes them.
        - `add_generation_prompt`: end with the beginning of an answer.
        - `continue_final_message`: end within the last message, which the model goes on with.
        - `variables`: further variables of the template, such as `enable_thinking`.

        **Raises** `ChatError` for messages that the template refuses.
        """
        prepared = [_alias_reasoning(map_texts(message, _escape_marks)) for message in messages]
        if continue_final_message:
            if add_generation_prompt or not prepared:
                raise ChatError("a final message is continued, or another one begun: pass messages and one of the two")
            if not isinstance(prepared[-1].get("content", ""), str):
                raise ChatError("the content of a final message that is continued is one text")
            # The space shows whether the template strips what it is given.
            prepared[-1] = prepared[-1] | {"content": prepared[-1].get("content", "") + _CONTINUE + " "}
        known = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        values = {**known, **self.special_tokens, **map_texts(variables, _escape_marks)}
        values["tools"] = map_texts(tools, _escape_marks)
        try:
            marked = self._template.render(messages=prepared, **values)
        except Exception as error:  # a template is a program: whatever it does is about these messages
            raise ChatError(f"{self.name} does not render these messages: {error}") from None
        if continue_final_message:
            marked, mark, rest = marked.rpartition(_CONTINUE)
            if not mark:
                raise ChatError(f"{self.name} drops the text that is to be continued")
            marked = marked if rest.startswith(" ") else marked.rstrip()
        return take_spans(marked)

    def encode(
        self, messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, **options: Any
    ) -> Int[np.ndarray, "tokens"]:
        """Return the tokens of a conversation. `options` are those of `render`. Only the template makes special tokens:
        what a message, a tool or a document spells like one is tokenized as text.

        **Raises** `ChatError` for messages that the template refuses, or that spell a special token which the tokenizer
        cannot write as text.
        """
        special = tokenizer.special_tokens
        text = self.render(protect(messages, special), **protect_options(options, special)).text
        return encode_rendered(text, tokenizer)


def read_chat_template(path: str | Path, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
    """Read the chat template of a checkpoint directory, or a `.jinja` file.

    - `special_tokens`: special tokens of the tokenizer that the template is used with,
      `read_special_tokens(directory)`. By default they come from a `tokenizer_config.json` in the template's directory.

    **Raises** `FileNotFoundError` for a path that does not exist, `NoChatTemplateError` for a directory without a
    template, and `ChatError` for a file of another kind or a damaged one, and for a file that writes BOS or EOS if
    neither `special_tokens` nor its directory names any.
    """
    path = Path(path)
    if path.is_dir():
        template = ChatTemplate.read(path)
        if special_tokens is None:
            return template
        return ChatTemplate(template.source, special_tokens, name=template.name)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: expected a checkpoint directory or a .jinja file")
    if path.suffix != ".jinja":
        raise ChatError(f"{path} is not a chat template: expected a checkpoint directory or a .jinja file")
    source = _read_source(path)
    if special_tokens is None:
        special_tokens = read_special_tokens(path.parent)
        written = re.search(r"\b[be]os_token\b", source)
        if written and not special_tokens:
            raise ChatError(
                f"{path} writes {written[0]}, which a tokenizer names, and there is none in its directory: pass "
                "read_special_tokens(directory) of the checkpoint"
            )
    return ChatTemplate(source, special_tokens, name=str(path))


def read_special_tokens(directory: str | Path) -> dict[str, str]:
    """Read the special tokens of a checkpoint directory by name, `{"bos_token": "<s>"}`. Empty without a
    tokenizer_config.json. **Raises** `ChatError` for a damaged one."""
    return find_special_tokens(_read_tokenizer_config(Path(directory)))


def find_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a tokenizer_config.json by name, `{"bos_token": "<s>"}`."""
    found = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def _escape_marks(text: str) -> str:
    return _MARKS.sub(lambda found: _LITERAL + found[0], text)


def mark_spans(chat: RenderedChat) -> str:
    """Write marks around the assistant's words into a text, which `take_spans` takes out of it."""
    pieces = []
    last = 0
    for place, mark in [
        (place, mark) for span in chat.spans for place, mark in zip(span, (_OPEN, _CLOSE), strict=True)
    ]:
        pieces += [_escape_marks(chat.text[last:place]), mark]
        last = place
    return "".join([*pieces, _escape_marks(chat.text[last:])])


def take_spans(marked: str) -> RenderedChat:
    """Take the marks around the assistant's words out of a text."""
    if not _MARKS.search(marked):
        return RenderedChat(marked, ())
    pieces = []
    spans = []
    length = 0
    start = 0
    for part in re.split(f"({_LITERAL}.|[{_OPEN}{_CLOSE}])", marked, flags=re.DOTALL):
        if part == _OPEN:
            start = length
        elif part == _CLOSE:
            spans.append((start, length))
        else:
            pieces.append(part.removeprefix(_LITERAL))
            length += len(pieces[-1])
    return RenderedChat("".join(pieces), tuple(spans))


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
        if (directory / name).exists():
            config = _read_table(directory / name)
            merged |= {key: value for key, value in config.items() if value is not None}
    return merged


def _read_table(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(_read(path))
    except ValueError as error:
        raise ChatError(f"{path} cannot be read: {error}") from None
    if not isinstance(table, dict):
        raise ChatError(f"{path} is not a JSON object")
    return table


def _read_source(path: Path) -> str:
    try:
        return _read(path).decode()
    except UnicodeDecodeError as error:
        raise ChatError(f"{path} is not a Jinja template: its bytes are not UTF-8 ({error})") from None


def _read(path: Path) -> bytes:
    try:
        return read_limited(path, JSON_BYTES)
    except (OSError, ValueError) as error:
        raise ChatError(f"{path} cannot be read: {error}") from None


def _make_environment(date: datetime.date | None) -> Any:
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

    def format_now(format: str) -> str:
        now = datetime.datetime.now()
        return (now if date is None else datetime.datetime.combine(date, now.time())).strftime(format)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, extensions.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = format_now
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
