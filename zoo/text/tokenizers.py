"""Tokenizers: raw bytes, or a `tokenizer.json`, from a checkpoint or trained on the corpus.

    tokenizer = find_tokenizer(directory, vocab=256)  # of a checkpoint, for prompts and texts
    tokenizer = read_tokenizer(directory)             # and to train on: its tokens must keep every byte
    tokenizer = train_bpe(documents, 4096, path)

In training, each document starts with a separator token. In the tokenizers that we make, it is token 0, the NUL byte,
which does not occur in text.
"""

import difflib
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Integer

from zoo._files import JSON_BYTES, copy_file, explain_wrong_folder, read_json, read_limited, write_json, write_text
from zoo._optional import import_optional

from .pieces import cut_at_lines, splits_at_lines
from .tokenizer_file import PROBE, TOKENIZER_FILE, TokenizerError, load_tokenizer, name_faults

SEPARATOR = 0
MAX_VOCAB = 2**24
"""Bound of vocabularies that are read, sixteen times the largest in use, since arrays of this length are made."""
_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_TOKENIZER_FILE_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)
"""Files of a Hugging Face directory that define its tokenizer, and which tokens end a text."""
_BATCH_BYTES = 2**20
_BATCH_DOCUMENTS = 1024
"""Documents that are tokenized at once: enough for all cores, and little memory next to their tokens."""
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_TEXT_BYTES = {*b"\t\n\r", *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF5)}
"""Bytes of UTF-8 text, without control characters other than tabs and ends of lines."""


@runtime_checkable
class Tokenizer(Protocol):
    """The interface that corpora, `zoo generate` and `zoo evaluate` need."""

    vocab: int
    separator: int
    """Token that starts a document in training."""
    end: int
    """Token that ends an answer (EOS); the separator, if the checkpoint names none."""
    prefix: tuple[int, ...]
    """Tokens that precede every prompt (BOS)."""
    suffix: tuple[int, ...]
    """Tokens that follow a text that an encoder reads (EOS, a language); the end, if the file names none."""
    cache_key: str
    """Identifies the tokenizer: equal keys produce equal tokens."""
    special_tokens: Mapping[str, int]
    """Id of each special token, by its spelling."""

    @property
    def token_bytes(self) -> Int[np.ndarray, "vocab"]:
        """Number of bytes of text per token; 0 for the separator."""
        ...

    def encode(self, text: str) -> Int[np.ndarray, "tokens"]:
        """Tokenize a prompt, without the prefix. The spelling of a special token gives that token."""
        ...

    def encode_with_offsets(
        self, text: str, *, find_special_tokens: bool = True
    ) -> tuple[Int[np.ndarray, "tokens"], Int[np.ndarray, "tokens 2"]]:
        """Tokenize as `encode` does; return start and end of each token in `text`, in characters, too.

        All tokens of a character that spans several of them have its offsets. Without `find_special_tokens`, the
        spelling of a special token is plain text, if the tokenizer has other tokens for it.
        """
        ...

    def encode_all(self, documents: Iterable[bytes]) -> Iterator[Integer[np.ndarray, "tokens"]]:
        """Tokenize each document, without separators. The spelling of a special token is plain text."""
        ...

    def decode(self, tokens: Sequence[int] | Integer[np.ndarray, "tokens"]) -> str:
        """Return the text of `tokens`. Special tokens have none; partial characters become U+FFFD."""
        ...

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` and its companion files into a checkpoint directory."""
        ...


def require_tokenizer(tokenizer: Any) -> None:
    """**Raises** `TypeError` for what is not a tokenizer, such as a directory, or the tokenizer of transformers."""
    if not hasattr(tokenizer, "cache_key"):
        raise TypeError(
            "expected a tokenizer of zoo.train.read_tokenizer(directory), which keeps every byte of a text, not "
            f"{type(tokenizer).__name__}"
        )


def encode_utf8(text: str, name: str = "the text") -> bytes:
    """Return `text` in UTF-8. **Raises** `ValueError`, naming the text, for a surrogate, which UTF-8 does not have."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        found = text[error.start]
        raise ValueError(
            f"{name} is not Unicode: character {error.start} is the surrogate U+{ord(found):04X}, which stands for a "
            "byte that was not UTF-8 or for half a character"
        ) from None


class ByteTokenizer:
    """Byte-level tokenizer: one token per byte, a vocabulary of 256. Needs neither training nor other packages.

    The separator is the NUL byte, spelled "\\0". Bytes have no other spelling of it: texts cannot hold one.
    """

    def __init__(self):
        self.vocab = 256
        self.separator = SEPARATOR
        self.end = SEPARATOR
        self.prefix: tuple[int, ...] = (SEPARATOR,)
        self.suffix: tuple[int, ...] = (SEPARATOR,)
        self.token_bytes = (np.arange(256) != SEPARATOR).astype(np.int64)
        self.cache_key = "256"
        self.special_tokens: Mapping[str, int] = {"\0": SEPARATOR}

    def encode(self, text: str) -> Int[np.ndarray, "tokens"]:
        return np.frombuffer(encode_utf8(text), np.uint8).astype(np.int64)

    def encode_with_offsets(
        self, text: str, *, find_special_tokens: bool = True
    ) -> tuple[Int[np.ndarray, "tokens"], Int[np.ndarray, "tokens 2"]]:
        tokens = self.encode(text)
        starts = np.cumsum((tokens & 0xC0) != 0x80) - 1  # bytes 10xxxxxx go on with a character
        return tokens, np.stack([starts, starts + 1], axis=-1)

    def encode_all(self, documents: Iterable[bytes]) -> Iterator[Integer[np.ndarray, "tokens"]]:
        return (np.frombuffer(document, np.uint8) for document in documents)

    def decode(self, tokens: Sequence[int] | Integer[np.ndarray, "tokens"]) -> str:
        tokens = np.asarray(tokens, np.int64)
        return tokens[tokens != SEPARATOR].astype(np.uint8).tobytes().decode(errors="replace")

    def save(self, directory: Path) -> None:
        write_text(directory / TOKENIZER_FILE, _byte_tokenizer_json())
        _write_tokenizer_config(directory, "\0", "\0")


class FileTokenizer:
    """The tokenizer of a `tokenizer.json`, for a model with `vocab` tokens.

    The separator is the first token of the prefix by default, and 0 without a prefix. The end of an answer is the
    separator by default.

    **Raises** `ImportError` if the package `tokenizers` is not installed; `TokenizerError` for a file that it cannot
    read.
    """

    def __init__(self, path: Path, vocab: int, separator: int | None = None, end: int | None = None):
        self._path = path
        self._tokenizer, facts, digest = load_tokenizer(path)
        self._text_of = _find_spelling(facts)
        self._splits_at_lines = splits_at_lines(facts)
        self.vocab = vocab
        self.prefix, suffix = self._find_special_tokens()
        self._tokenizer.post_processor = None  # it only adds special tokens, and takes spaces out of offsets
        if separator is None:
            separator = self.prefix[0] if self.prefix else SEPARATOR
        self.separator = separator
        self.end = separator if end is None else end
        self.suffix = suffix or (self.end,)
        self.cache_key = f"{vocab} {separator} {digest}"
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens: Mapping[str, int] = {x.content: token for token, x in added.items() if x.special}

    def __reduce__(self) -> tuple[Any, ...]:
        return FileTokenizer, (self._path, self.vocab, self.separator, self.end)  # another process reads the file again

    def _find_special_tokens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Find the special tokens before and after a text by encoding one."""
        with_special = self._tokenizer.encode("a").ids
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        starts = [i for i in range(len(with_special)) if plain and with_special[i : i + len(plain)] == plain]
        if not starts:
            return (), ()
        return tuple(with_special[: starts[0]]), tuple(with_special[starts[0] + len(plain) :])

    @property
    def token_bytes(self) -> Int[np.ndarray, "vocab"]:
        """Number of bytes of text per token; 0 for special tokens, and for ids that the file does not use."""
        token_bytes = np.zeros(self.vocab, np.int64)
        for token, text in self._texts.items():
            if token < self.vocab:
                token_bytes[token] = len(text)
        return token_bytes

    @functools.cached_property
    def _texts(self) -> dict[int, bytes]:
        """The bytes of each token. Empty if tokens are not spelled in bytes."""
        if self._text_of is None:
            return {}
        texts = {index: self._text_of(word) for word, index in self._tokenizer.get_vocab().items()}
        added = self._tokenizer.get_added_tokens_decoder()
        for index, token in added.items():
            texts[index] = b"" if token.special else token.content.encode()
        texts[self.separator] = b""
        return texts

    def check_for_training(self) -> None:
        """**Raises** `TokenizerError` if the ids exceed the vocabulary, or if tokens would lose bytes of a text."""
        ids = self._tokenizer.get_vocab()
        if (count := 1 + max(ids.values(), default=-1)) > self.vocab:
            raise TokenizerError(
                f"{self._path} has {count} tokens, and its model knows {self.vocab}: they are not of one checkpoint"
            )
        if self._tokenizer.id_to_token(self.separator) is None:
            raise TokenizerError(f"{self._path} has no token {self.separator}, to start a document with")
        if self._text_of is None:
            raise TokenizerError(
                f"{self._path}: its tokens are neither byte-level nor do they fall back to bytes, and we read no others"
            )
        if missing := sorted(_TEXT_BYTES - {text[0] for text in self._texts.values() if len(text) == 1}):
            raise TokenizerError(f"{self._path} has no token for the byte {missing[0]:#04x}, which text would lose")
        # A normalizer changes text on purpose, and some tokenizers begin each with a space. Nothing else may be lost.
        if self._tokenizer.normalizer is None:
            (tokens,) = self.encode_all([PROBE.encode()])
            spelled = b"".join(self._texts[token] for token in tokens.tolist()).decode(errors="replace")
            for again in (spelled, self.decode(tokens)):
                if again.removeprefix(" ") != PROBE:
                    raise TokenizerError(f"{self._path} loses text: {PROBE!r} is read as {again!r}")

    def encode(self, text: str) -> Int[np.ndarray, "tokens"]:
        return self.encode_with_offsets(text)[0]

    def encode_with_offsets(
        self, text: str, *, find_special_tokens: bool = True
    ) -> tuple[Int[np.ndarray, "tokens"], Int[np.ndarray, "tokens 2"]]:
        encode_utf8(text)  # raises for text that is not Unicode
        with name_faults(self._path, "cannot tokenize a text"):
            self._tokenizer.encode_special_tokens = not find_special_tokens  # True takes their spelling as plain text
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
            offsets = np.fromiter(itertools.chain.from_iterable(encoded.offsets), np.int64, 2 * len(encoded))
            return np.array(encoded.ids, np.int64), offsets.reshape(-1, 2)

    def encode_all(self, documents: Iterable[bytes]) -> Iterator[Integer[np.ndarray, "tokens"]]:
        for batch in _batch_documents(documents):
            if self._splits_at_lines and len(batch[0]) > _BATCH_BYTES:
                (document,) = batch
                pieces = [
                    tokens for piece in cut_at_lines(document, _BATCH_BYTES) for tokens in self._encode_batch([piece])
                ]
                yield np.concatenate(pieces)
            else:
                yield from self._encode_batch(batch)

    def _encode_batch(self, documents: Sequence[bytes]) -> Iterator[Int[np.ndarray, "tokens"]]:
        """Tokenize documents on all cores; one by one if that fails, up to the one at fault."""
        self._tokenizer.encode_special_tokens = True
        try:
            with name_faults(self._path, "cannot tokenize a text"):
                texts = [document.decode() for document in documents]
                encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except TokenizerError:
            if len(documents) == 1:
                raise
            for document in documents:
                yield from self._encode_batch([document])
            return
        for each in encoded:
            yield np.array(each.ids, np.int64)

    def decode(self, tokens: Sequence[int] | Integer[np.ndarray, "tokens"]) -> str:
        with name_faults(self._path, "cannot decode tokens"):
            return self._tokenizer.decode(np.asarray(tokens, np.int64).tolist())

    def save(self, directory: Path) -> None:
        for path in sorted({path for pattern in _TOKENIZER_FILE_PATTERNS for path in self._path.parent.glob(pattern)}):
            copy_file(path, directory / path.name)
        if not (self._path.parent / _TOKENIZER_CONFIG_FILE).exists():
            spell = self._tokenizer.id_to_token
            _write_tokenizer_config(directory, spell(self.separator), spell(self.end))


def train_bpe(documents: Iterable[bytes], vocab: int, path: Path) -> FileTokenizer:
    """Train a byte-level BPE of `vocab` tokens on `documents` and write it to `path`. Deterministic.

    Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units", 2016.
    """
    tokenizers = import_optional("tokenizers", "pip install 'equizoo[text]'")
    level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["\0"], initial_alphabet=sorted(level.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator((document.decode() for document in documents), trainer)
    # Readers of the file then prepend the separator, as in training.
    prepend = tokenizers.processors.TemplateProcessing(single="\0 $A", special_tokens=[("\0", SEPARATOR)])
    tokenizer.post_processor = prepend
    tokenizer.save(str(path))
    return FileTokenizer(path, vocab)


def have_equal_tokens(first: Tokenizer, second: Tokenizer) -> bool:
    """Return True if two tokenizers make the same tokens of a text. Their models may pad the vocabulary to other sizes,
    and begin and end texts with other tokens."""
    return first.cache_key.split()[-1] == second.cache_key.split()[-1]


def find_tokenizer(directory: str | Path, vocab: int) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint: its `tokenizer.json`, else bytes if the vocabulary is 256, else None."""
    path = Path(directory) / TOKENIZER_FILE
    if path.exists():
        if _is_byte_tokenizer(path):
            return ByteTokenizer()
        return FileTokenizer(path, vocab)
    if vocab == 256:
        return ByteTokenizer()
    return None


def read_tokenizer(directory: str | Path, vocab: int | None = None) -> Tokenizer:
    """Read the tokenizer of a checkpoint directory, to train with, from its `tokenizer.json` and `config.json`.

    The separator is `bos_token_id` or, if that is not set, `eos_token_id`. An answer ends with the latter, without one
    with the separator. Of a model that reads images they may be in `text_config`, or in generation_config.json only.

    - `vocab`: number of tokens that the model knows, by default `vocab_size` of the config.

    **Raises** `FileNotFoundError` if a file is missing, and `TokenizerError`, a `ValueError`, if a file is damaged, if
    the two do not match, or if tokenizing a text would lose bytes of it, unless the model has an encoder.
    """
    directory = Path(directory)
    path = directory / TOKENIZER_FILE
    config = directory / "config.json"
    for required in (path, config):
        if not required.exists():
            raise FileNotFoundError(
                explain_wrong_folder(directory)
                or f"{required}: there is no such file, which says how text becomes the model's tokens"
            )
    with name_faults(config, "cannot be read"):
        facts = read_json(config)
        if not isinstance(facts, dict):
            raise ValueError(f"expected a JSON object, got {type(facts).__name__}")
    if isinstance(facts.get("text_config"), dict):
        generation = directory / "generation_config.json"
        parts = [read_json(generation) if generation.exists() else {}, facts["text_config"], facts]
        facts = {name: value for part in parts for name, value in part.items() if value is not None}
    vocab = facts.get("vocab_size") if vocab is None else vocab
    if type(vocab) is not int or not 0 < vocab < MAX_VOCAB:
        raise TokenizerError(
            f"{config}: vocab_size is a number of tokens from 1 to {MAX_VOCAB - 1:,}, not {str(vocab)[:50]}"
        )
    if _is_byte_tokenizer(path):
        if vocab < 256:
            raise TokenizerError(f"{path} has 256 tokens, and the model that {config} describes knows {vocab}")
        return ByteTokenizer()
    named = []
    for key in ("bos_token_id", "eos_token_id"):
        tokens = facts.get(key)
        named.append(tokens[0] if isinstance(tokens, list) and tokens else tokens)
    begin, end = named
    separator = end if begin is None else begin
    for token in (separator, separator if end is None else end):
        if type(token) is not int or not 0 <= token < vocab:
            raise TokenizerError(
                f"{config} names no token of the {vocab} as bos_token_id or eos_token_id, to begin a text with"
            )
    tokenizer = FileTokenizer(path, vocab, separator, end)
    if not facts.get("is_encoder_decoder"):  # whose losses are per token, and need no bytes
        tokenizer.check_for_training()
    return tokenizer


def find_language_token(tokenizer: Tokenizer, language: str) -> int:
    """Return the token of a language: `fra_Latn`, `fr_XX`, `__fr__`, `<|fr|>`, or what these have in common, `fr`.

    **Raises** `ValueError` for a language that the tokenizer does not have, with the nearest that it has.
    """
    codes = {spelling.strip("_<|>"): token for spelling, token in tokenizer.special_tokens.items()}
    if language in codes:
        return codes[language]
    short = {code: token for code, token in codes.items() if code.partition("_")[0] == language}
    if len(short) == 1:
        return next(iter(short.values()))
    nearest = list(short) or difflib.get_close_matches(language, codes, n=3, cutoff=0.3)
    hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
    raise ValueError(f"the tokenizer has no token for the language {language!r}{hint}")


def count_bytes(text: str, offsets: Int[np.ndarray, "tokens 2"]) -> Int[np.ndarray, "tokens"]:
    """Return the number of bytes of each token of a text, from its offsets in characters.

    The numbers sum to the bytes of the text. A character that spans several tokens counts for the first of them, one
    that no token covers for the next token, and at the end for the last.
    """
    codepoints = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    utf8_lengths = 1 + (codepoints >= 0x80) + (codepoints >= 0x800) + (codepoints >= 0x10000)
    byte_offsets = np.concatenate([[0], np.cumsum(utf8_lengths)])
    ends = np.maximum.accumulate(byte_offsets[offsets[:, 1]])
    ends[-1:] = byte_offsets[-1]
    return np.diff(ends, prepend=0)


def _batch_documents(documents: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Group documents into batches of at most `_BATCH_BYTES`, if each is smaller, and `_BATCH_DOCUMENTS`."""
    batch: list[bytes] = []
    size = 0
    for document in documents:
        if batch and (size + len(document) > _BATCH_BYTES or len(batch) == _BATCH_DOCUMENTS):
            yield batch
            batch = []
            size = 0
        batch.append(document)
        size += len(document)
    if batch:
        yield batch


def _unicode_to_bytes() -> dict[str, int]:
    """GPT-2's map from the characters of a byte-level vocabulary to bytes: printable ones are themselves, others start
    at U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _find_spelling(facts: dict[str, Any]) -> Callable[[str], bytes] | None:
    """Return the function from a token's spelling to its bytes, None for a tokenizer that is neither byte-level nor
    falls back to bytes. `facts` is a parsed `tokenizer.json`."""
    letters = _unicode_to_bytes()
    byte = re.compile("<0x([0-9A-F]{2})>")

    def spell_byte_level(word: str) -> bytes:
        # A word of other letters stands for itself, as in the package.
        if letters.keys() >= {*word}:
            return bytes(letters[letter] for letter in word)
        return word.encode()

    def spell_byte_fallback(word: str) -> bytes:
        found = byte.fullmatch(word)
        if found:
            return bytes.fromhex(found[1])
        return word.replace("▁", " ").encode()

    decoder = json.dumps(facts.get("decoder"))
    if '"ByteLevel"' in decoder:
        return spell_byte_level
    if '"ByteFallback"' in decoder and facts["model"].get("byte_fallback"):
        return spell_byte_fallback
    return None


def _byte_tokenizer_json() -> str:
    """Return the `tokenizer.json` of `ByteTokenizer`: one character per byte, and the separator."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    single = [{"SpecialToken": {"id": "\0", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    letters = {letter: byte for letter, byte in sorted(_unicode_to_bytes().items()) if byte != SEPARATOR}
    facts = {
        "version": "1.0",
        "added_tokens": [{"id": SEPARATOR, "content": "\0", "special": True, **flags}],
        "pre_tokenizer": _BYTE_LEVEL,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"\0": {"id": "\0", "ids": [SEPARATOR], "tokens": ["\0"]}},
        },
        "decoder": _BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": {"\0": SEPARATOR, **letters}, "merges": []},
    }
    return json.dumps(facts, indent=2, ensure_ascii=False) + "\n"


def _is_byte_tokenizer(path: Path) -> bool:
    """Return True for the file that `ByteTokenizer.save` writes."""
    with name_faults(path, "cannot be read"):
        return read_limited(path, JSON_BYTES) == _byte_tokenizer_json().encode()


def _write_tokenizer_config(directory: Path, begin: str, end: str) -> None:
    """Write `tokenizer_config.json`, which names the tokens that begin and end a text."""
    facts: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(directory / _TOKENIZER_CONFIG_FILE, {**facts, "bos_token": begin, "eos_token": end})
