"""Implement `zoo chat`."""

import contextlib
import importlib
import json
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

import zoo
from zoo._compile_cache import enable_compile_cache
from zoo._files import write_text
from zoo._terminal import show
from zoo.adapters.peft.config import CONFIG_FILE
from zoo.generate import Conversation
from zoo.generate.request import TRUNCATIONS, check_decoder
from zoo.parallel.devices import make_device_mesh
from zoo.text.chat.errors import ChatError, NoChatTemplateError
from zoo.text.chat.images import check_placeholders, expand_chat, reads_parts, take_pictures
from zoo.text.chat.special_tokens import encode_rendered, protect
from zoo.text.chat.template import ChatTemplate
from zoo.text.stream_decoder import StoppingDecoder, decode_until_stop
from zoo.text.tokenizers import Tokenizer, find_tokenizer
from zoo.weights.directory import resolve_directory
from zoo.weights.generation_config import read_generation_defaults, read_stop_tokens

from .pictures import Pictures, read_pictures
from .sampling_flags import SamplingFlags

_HELP = """/reset          forget the conversation, and keep the system prompt and pictures
/system TEXT    begin anew with another system prompt
/image FILE     begin anew with a picture
/save FILE      write the conversation as JSON
/exit           end; Ctrl-D too
Ctrl-C stops an answer."""


def chat(
    directory: Annotated[Path, tyro.conf.Positional],
    *,
    adapter: Path | None = None,
    system: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None,
    image: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(metavar="FILE")] = (),
    max_new_tokens: int = 1024,
    sampling: Annotated[SamplingFlags, tyro.conf.OmitArgPrefixes],
    stop: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT")] = (),
    seed: int = 0,
    variable: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE")] = (),
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    no_compile_cache: bool = False,
) -> None:
    """Chat with a model in the terminal: zoo chat Qwen/Qwen3-0.6B.

    Renders the conversation by the checkpoint's chat template, and shows tokens as they come. A turn reads only what
    is new. Special tokens that are typed are plain text. A model without a chat template continues the text. Without a
    terminal each line of standard input is a turn. Commands: /reset, /system TEXT, /image FILE, /save FILE, /help,
    /exit; Ctrl-C stops an answer.

    Args:
        directory: Checkpoint directory with config.json, safetensors and tokenizer.json, or a name on the Hugging Face
            hub, with @REVISION behind it for another than the newest.
        adapter: Directory or name of a PEFT adapter, which is merged into the model.
        system: System prompt.
        image: Picture of the first turn, for a model of images and texts. Repeat for several.
        max_new_tokens: Maximum number of tokens per answer.
        sampling: How tokens are drawn. Default of the first five: generation_config.json, else a temperature of 0.7.
        stop: Text that ends an answer, and is not shown. It may spell special tokens. Repeat for several.
        seed: Random seed of the samples.
        variable: Variables of the chat template, in JSON: enable_thinking=false.
        dtype: Dtype of the parameters and the computation. Default: as stored.
        fsdp: Fully sharded data parallelism: number of devices that shard the parameters.
        expert: Expert parallelism: devices that share the experts of mixtures out.
        context: Context parallelism: number of devices that share KV caches.
        tensor: Tensor parallelism: number of devices that shard heads, MLP and vocabulary.
        no_compile_cache: Compile anew: neither read compiled programs from the user's cache folder nor keep them there.
    """
    if not no_compile_cache:
        enable_compile_cache()
    variables = _parse_variables(variable)
    path = resolve_directory(directory)
    if adapter is not None:
        adapter = resolve_directory(adapter, config=CONFIG_FILE)
    pictures = read_pictures(path, image)
    mesh = make_device_mesh(data=1, fsdp=fsdp, expert=expert, context=context, tensor=tensor, pipe=1)
    model = zoo.load(path, mesh=mesh, dtype=dtype)
    decoder = model.decoder if isinstance(model, zoo.models.ImageText) else model
    check_decoder(decoder)
    if adapter is not None:
        model = zoo.adapters.merge(zoo.adapters.load(model, adapter))
    vocab, _ = decoder.embedding.table_shape
    tokenizer = find_tokenizer(path, vocab)
    if tokenizer is None:
        raise ValueError(f"{path} has no tokenizer.json, and a chat needs one")
    given = {name: value for name, value in vars(sampling).items() if value is not None}
    options: dict[str, Any] = {"temperature": 0.7} | read_generation_defaults(path) | given
    if not options["temperature"]:
        options = {name: value for name, value in options.items() if name not in TRUNCATIONS}
    template = _read_template(path)
    stops = [token for token in read_stop_tokens(path) if token < vocab]
    if template is not None:
        end = tokenizer.special_tokens.get(template.special_tokens.get("eos_token", ""))
        if end is not None and end not in stops:
            stops.append(end)
    conversation = Conversation(model, stop_tokens=stops, mesh=mesh, key=jax.random.key(seed), **options)
    in_parts = decoder is not model and template is not None and reads_parts(template)
    session = _Session(conversation, tokenizer, template, variables, stops, max_new_tokens, stop, in_parts=in_parts)
    session.begin(system, pictures)
    _run(session, path)


class _Session:
    """The messages of a chat, their text, and the tokens that the model has read or written of it."""

    def __init__(
        self,
        conversation: Conversation,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        variables: dict[str, Any],
        stops: Sequence[int],
        max_new_tokens: int,
        stop: Sequence[str] = (),
        *,
        in_parts: bool = False,
    ):
        """`in_parts`: write the content of messages in parts, as templates of models of images read it."""
        self._conversation = conversation
        self._tokenizer = tokenizer
        self._template = template
        self._variables = variables
        self._stops = stops
        self._max_new_tokens = max_new_tokens
        self._stop_strings = stop
        self._in_parts = in_parts
        self.system: str | None = None
        self.pictures: Pictures | None = None
        self.messages: list[dict[str, Any]] = []
        self._text = ""
        self._tokens: list[int] = []

    def begin(self, system: str | None, pictures: Pictures | None = None) -> None:
        """Begin a conversation, with pictures in its first turn. **Raises** `ChatError` for a system prompt or pictures
        that a model without a template for them gets."""
        if system is not None and self._template is None:
            raise ChatError("a system prompt needs a chat template, and this model has none")
        if pictures is not None and not self._in_parts:
            where = "this model has none" if self._template is None else f"{self._template.name} has none"
            raise ChatError(
                f"{pictures.files[0]}: a picture needs a place in the chat template, and {where}: zoo generate "
                "--image takes a prompt instead"
            )
        self.system = system
        self.pictures = pictures
        self.messages = [] if system is None else [{"role": "system", "content": self._write(system)}]
        self._text = ""
        self._tokens = []

    def answer(self, question: str) -> Generator[str, None, None]:
        """Add a turn; yield the text of the answer as it comes. Closed early, it keeps what was yielded.

        **Raises** `ValueError`, without the turn, for messages that the template refuses and for more tokens than the
        model has positions.
        """
        seen = None
        if self.pictures is not None and all(message["role"] != "user" for message in self.messages):
            seen = self.pictures
        asked = [*self.messages, {"role": "user", "content": self._write(question, seen)}]
        text, tokens = self._encode(asked)
        special_tokens = self._tokenizer.special_tokens
        decoder = StoppingDecoder(self._tokenizer.decode, tokens, self._stop_strings, special_tokens)
        new: list[int] = []
        images = {} if self.pictures is None else {"images": self.pictures.images}
        stream = self._conversation.stream(tokens, max_new_tokens=self._max_new_tokens, **images)
        try:
            for token in stream:
                new.append(token)
                if token not in self._stops or token in special_tokens.values():  # which may end a stop string
                    yield decoder.push(token)
                if decoder.ended:
                    stream.close()
                    break
            yield decoder.flush()
        except GeneratorExit:
            stream.close()
            self._record(asked, text, tokens, new, decoder.ended)
            raise
        self._record(asked, text, tokens, new, decoder.ended)

    def _record(
        self, asked: list[dict[str, Any]], text: str, tokens: list[int], new: list[int], at_stop_string: bool
    ) -> None:
        """Add a turn to the messages, and its text and tokens to what the next turn goes on from."""
        has_ended = bool(new) and new[-1] in self._stops
        special_tokens = self._tokenizer.special_tokens
        said = new[:-1] if has_ended and new[-1] not in special_tokens.values() else new
        words = decode_until_stop(self._tokenizer.decode, said, self._stop_strings, special_tokens)
        self.messages = [*asked, {"role": "assistant", "content": self._write(words)}]
        self._tokens = [*tokens, *new]
        (written,) = protect([{"content": words}], self._tokenizer.special_tokens)
        self._text = text + written["content"]
        if has_ended:
            self._text += self._spell(new[-1])
        if at_stop_string:  # the tokens go beyond the message: the next turn encodes it anew
            self._text = ""

    def _write(self, text: str, pictures: Pictures | None = None) -> Any:
        """Return the content of a message."""
        if not self._in_parts:
            return text
        files = () if pictures is None else pictures.files
        return [*({"type": "image", "path": file} for file in files), {"type": "text", "text": text}]

    def _encode(self, messages: Sequence[dict[str, Any]]) -> tuple[str, list[int]]:
        """Return text and tokens of messages up to the next answer. Tokens so far stay if the text so far does."""
        if self._template is None:
            (new,) = self._tokenizer.encode_all([messages[-1]["content"].encode()])
            before = self._tokens or list(self._tokenizer.prefix)
            return "", [*before, *new.tolist()]
        plain, _ = take_pictures(messages)
        protected = protect(plain, self._tokenizer.special_tokens)
        chat = self._template.render(protected, add_generation_prompt=True, **self._variables)
        if self.pictures is not None:
            config = self.pictures.config
            check_placeholders(self._template, chat, len(self.pictures.files), config, self._tokenizer)
            chat = expand_chat(chat, self.pictures.processed, config)
        text = chat.text
        if self._text and text.startswith(self._text):
            new = encode_rendered(text[len(self._text) :], self._tokenizer)
            return text, [*self._tokens, *new.tolist()]
        return text, encode_rendered(text, self._tokenizer).tolist()

    def _spell(self, token: int) -> str:
        spellings = {number: spelling for spelling, number in self._tokenizer.special_tokens.items()}
        return spellings.get(token, "")


def _run(session: _Session, directory: Path) -> None:
    """Read turns until the input ends."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # input() then has its history and its keys
        show("/help shows the commands; Ctrl-D ends.")
    while True:
        try:
            line = input(">>> " if is_terminal else "")
        except EOFError:
            if is_terminal:
                show()
            return
        except KeyboardInterrupt:
            show()
            continue
        if not line.strip():
            continue
        try:
            if line.startswith("/"):
                if _obey(session, line, directory):
                    return
            else:
                _show_answer(session, line)
        except (ValueError, OSError) as error:
            show(f"error: {error}", file=sys.stderr)


def _obey(session: _Session, line: str, directory: Path) -> bool:
    """Carry out a command; return True for the end. `directory` is the checkpoint's."""
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    match command:
        case "/exit" | "/quit":
            return True
        case "/reset":
            session.begin(session.system, session.pictures)
        case "/system":
            session.begin(rest or None, session.pictures)
        case "/image" if rest:
            session.begin(session.system, read_pictures(directory, [rest]))
        case "/save" if rest:
            write_text(Path(rest).expanduser(), json.dumps(session.messages, indent=2, ensure_ascii=False) + "\n")
            show(f"wrote {rest}")
        case "/save" | "/image":
            show(f"{command} FILE: the name of a file is missing")
        case "/help":
            show(_HELP)
        case _:
            show(f"there is no command {command}: /help shows all; a space before the / makes it text")
    return False


def _show_answer(session: _Session, line: str) -> None:
    """Print an answer as it comes. Ctrl-C ends it, and what was printed is the answer."""
    stream = session.answer(line)
    with _stop_on_interrupt() as is_stopped:
        for piece in stream:
            show(piece, end="")
            if is_stopped():
                break
    stream.close()
    show()


@contextlib.contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Take Ctrl-C as a wish to stop, instead of an exception in the middle of a step, which has donated its caches. A
    second one raises."""
    pressed: list[int] = []

    def press(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _read_template(directory: Path) -> ChatTemplate | None:
    """Return the chat template of a checkpoint; None, with a line, if it has none."""
    try:
        return ChatTemplate.read(directory)
    except NoChatTemplateError:
        show(f"{directory} has no chat template: what you type is continued as text", file=sys.stderr)
        return None


def _parse_variables(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the variables of a template. **Raises** `ValueError` for one that is not NAME=VALUE."""
    variables = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--variable is NAME=VALUE, such as enable_thinking=false, not {pair!r}")
        try:
            variables[name] = json.loads(value)
        except ValueError:
            variables[name] = value
    return variables
