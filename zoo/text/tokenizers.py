"""Tokenizers for training: raw bytes, byte-pair encoding trained on the corpus, or the tokenizer of a checkpoint.

Each document starts with a separator token. In the tokenizers that we make, it is token 0, the NUL byte, which does not
occur in text.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Integer

from zoo._files import copy_file, write_json
from zoo._optional import import_optional

from .tokenizer_file import PROBE, TOKENIZER_FILE, TokenizerError, TokenizerFile, name_faults, read_model_facts

SEPARATOR = 0
_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_TOKENIZER_FILE_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)
"""Files of a Hugging Face directory that define its tokenizer."""
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_TEXT_BYTES = {*b"\t\n\r", *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF5)}
"""Bytes of UTF-8 text, without control characters other than tabs and ends of lines."""


@runtime_checkable
class Tokenizer(Protocol):
    """The interface that a corpus needs."""

    vocab: int
    separator: int
    token_bytes: Int[np.ndarray, "vocab"]
    """Number of bytes of text per token; 0 for the separator."""
    cache_key: str
    """Identifies the tokenizer: equal keys produce equal tokens."""

    def encode_all(self, documents: Iterable[bytes]) -> Iterator[Integer[np.ndarray, "tokens"]]:
        """Tokenize each document, without separators."""
        ...

    def decode(self, tokens: Integer[np.ndarray, "tokens"]) -> bytes:
        """Return the bytes of `tokens`; separators have none."""
        ...

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` and its companion files into a checkpoint directory."""
        ...


class ByteTokenizer:
    """Byte-level tokenizer: one token per byte, a vocabulary of 256. Needs neither training nor other packages."""

    def __init__(self):
        self.vocab = 256
        self.separator = SEPARATOR
        self.token_bytes = (np.arange(256) != SEPARATOR).astype(np.int64)
        self.cache_key = "256"

    def encode_all(self, documents: Iterable[bytes]) -> Iterator[Integer[np.ndarray, "tokens"]]:
        return (np.frombuffer(document, np.uint8) for document in documents)

    def decode(self, tokens: Integer[np.ndarray, "tokens"]) -> bytes:
        return tokens[tokens != SEPARATOR].astype(np.uint8).tobytes()

    def save(self, directory: Path) -> None:
        separator = {"id": SEPARATOR, "content": "\0", "special": True}
        separator |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        single = [{"SpecialToken": {"id": "\0", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        write_json(
            directory / TOKENIZER_FILE,
            {
                "version": "1.0",
                "added_tokens": [separator],
                "pre_tokenizer": _BYTE_LEVEL,
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": single,
                    "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
                    "special_tokens": {"\0": {"id": "\0", "ids": [SEPARATOR], "tokens": ["\0"]}},
                },
                "decoder": _BYTE_LEVEL,
                "model": {"type": "BPE", "vocab": _make_byte_vocab(), "merges": []},
            },
        )
        _write_tokenizer_config(directory, "\0")


class BPETokenizer:
    """Byte-pair encoding (BPE), read from a `tokenizer.json`, for a model with `vocab` tokens.

    Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units", 2016.

    **Raises** `TokenizerError` if the file is not a byte-level or byte-fallback BPE, or has more than `vocab` tokens.
    """

    def __init__(self, path: Path, vocab: int, separator: int = SEPARATOR):
        file = TokenizerFile.read(path)
        if file.count > vocab:
            raise TokenizerError(f"{path} holds {file.count} tokens, more than the vocabulary of {vocab}")
        self.vocab, self.separator = vocab, separator
        self.cache_key = f"{vocab} {separator} {file.digest}"
        self._path = path
        self._words = {index: word for word, index in file.ids.items()}
        text_of = _make_token_decoder(file)
        self._tokenizer = file.build()
        # The text of a special token within a document is plain text.
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        # A short corpus has fewer than `vocab` pairs: the remaining tokens decode to nothing.
        self._texts: dict[int, bytes] = {}
        for index, word in self._words.items():
            if index not in added:
                self._texts[index] = text_of(word)
            elif not added[index].special:
                self._texts[index] = word.encode()
        self._texts[separator] = b""
        self.token_bytes = np.zeros(vocab, np.int64)
        self.token_bytes[[*self._texts]] = [len(text) for text in self._texts.values()]
        # A normalizer changes text on purpose, and some tokenizers begin each with a space. Nothing else may be lost.
        again = self.decode(next(self.encode_all([PROBE.encode()]))).decode(errors="replace")
        if not file.facts.get("normalizer") and again.removeprefix(" ") != PROBE:
            raise TokenizerError(f"{path} loses text: {PROBE!r} is read as {again!r}")

    @staticmethod
    def train(documents: Iterable[bytes], vocab: int, path: Path) -> "BPETokenizer":
        """Train a BPE of `vocab` tokens on `documents` and write it to `path`. Deterministic."""
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
        return BPETokenizer(path, vocab)

    def encode_all(self, documents: Iterable[bytes]) -> Iterator[Integer[np.ndarray, "tokens"]]:
        for document in documents:
            with name_faults(self._path, "cannot tokenize a text"):
                tokens = self._tokenizer.encode(document.decode(), add_special_tokens=False).ids
            yield np.array(tokens, np.int64)

    def decode(self, tokens: Integer[np.ndarray, "tokens"]) -> bytes:
        return b"".join(self._texts.get(token, b"") for token in tokens.tolist())

    def save(self, directory: Path) -> None:
        for path in sorted({path for pattern in _TOKENIZER_FILE_PATTERNS for path in self._path.parent.glob(pattern)}):
            copy_file(path, directory / path.name)
        if not (self._path.parent / _TOKENIZER_CONFIG_FILE).exists():
            _write_tokenizer_config(directory, self._words[self.separator])


def read_tokenizer(directory: Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint directory from its `tokenizer.json` and `config.json`.

    The separator is `bos_token_id` or, if that is not set, `eos_token_id`.

    **Raises** `FileNotFoundError` if a file is missing, and `TokenizerError`, a `ValueError`, if one is damaged or the
    two do not match.
    """
    path, config = directory / TOKENIZER_FILE, directory / "config.json"
    for required in (path, config):
        if not required.exists():
            raise FileNotFoundError(
                f"{required}: there is no such file, which says how text becomes the model's tokens"
            )
    file, facts = TokenizerFile.read(path), read_model_facts(config)
    vocab = facts["vocab_size"]
    if file.count > vocab:
        raise TokenizerError(
            f"{path} has {file.count} tokens, and the model that {config} describes knows {vocab}: they are not of one "
            "checkpoint"
        )
    if _is_byte_tokenizer(file):
        return ByteTokenizer()
    named = facts.get("bos_token_id"), facts.get("eos_token_id")
    separators = [token for entry in named for token in (entry if isinstance(entry, list) else [entry])]
    separator = next((token for token in separators if token is not None), None)
    if not isinstance(separator, int) or isinstance(separator, bool) or separator not in file.ids.values():
        raise TokenizerError(
            f"{config} names no token of the {vocab} as bos_token_id or eos_token_id, to begin a text with"
        )
    return BPETokenizer(path, vocab, separator)


def _unicode_to_bytes() -> dict[str, int]:
    """GPT-2's map from the characters of a byte-level vocabulary to bytes: printable ones are themselves, others start
    at U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _make_byte_vocab() -> dict[str, int]:
    """The vocabulary of `ByteTokenizer` in `tokenizer.json`: one character per byte, and the separator."""
    return {"\0": SEPARATOR} | {
        letter: byte for letter, byte in sorted(_unicode_to_bytes().items()) if byte != SEPARATOR
    }


def _is_byte_tokenizer(file: TokenizerFile) -> bool:
    """Return True for a file that tokenizes as the one of `ByteTokenizer.save` does."""
    facts, model = file.facts, file.facts["model"]
    is_plain = not model.get("merges") and not facts.get("normalizer")
    is_byte_level = facts.get("pre_tokenizer") == facts.get("decoder") == _BYTE_LEVEL
    return is_plain and is_byte_level and file.ids == model["vocab"] == _make_byte_vocab()


def _make_token_decoder(file: TokenizerFile) -> Callable[[str], bytes]:
    """Return the function from a token's spelling to its bytes, for byte-level and byte-fallback decoders.

    **Raises** `TokenizerError` for any other decoder, and if text has bytes that no token stands for: they would be
    left out of it.
    """
    letters, decoder = _unicode_to_bytes(), json.dumps(file.facts.get("decoder"))
    if '"ByteLevel"' in decoder:
        spellings = {byte: letter for letter, byte in letters.items()}
        # A word of other letters stands for itself, as in the package.
        text_of = lambda word: bytes(letters[x] for x in word) if letters.keys() >= {*word} else word.encode()
    elif '"ByteFallback"' in decoder and file.facts["model"].get("byte_fallback"):
        spellings = {byte: f"<0x{byte:02X}>" for byte in range(256)}
        byte = re.compile("<0x([0-9A-F]{2})>")
        text_of = lambda word: bytes.fromhex(m[1]) if (m := byte.fullmatch(word)) else word.replace("▁", " ").encode()
    else:
        raise TokenizerError(
            f"{file.path}: its tokens are neither byte-level nor do they fall back to bytes, and we read no others"
        )
    if missing := [byte for byte in sorted(_TEXT_BYTES) if spellings[byte] not in file.ids]:
        raise TokenizerError(f"{file.path} has no token for the byte {missing[0]:#04x}, which text would lose")
    return text_of


def _write_tokenizer_config(directory: Path, separator: str) -> None:
    """Write `tokenizer_config.json`, which names the tokens that begin and end a text."""
    facts: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(directory / _TOKENIZER_CONFIG_FILE, facts | {"bos_token": separator, "eos_token": separator})
