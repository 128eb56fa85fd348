"""Tokenizers for training: raw bytes, byte-pair encoding trained on the corpus, or the tokenizer of a checkpoint.

Each document starts with a separator token. In the tokenizers that we make, it is token 0, the NUL byte, which does not
occur in text.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Integer

from zoo._files import read_json, write_json
from zoo._optional import import_optional

SEPARATOR = 0
_TOKENIZER_FILE, _TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
_TOKENIZER_FILE_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)
"""Files of a Hugging Face directory that define its tokenizer."""


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
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        separator = {"id": SEPARATOR, "content": "\0", "special": True}
        separator |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        single = [{"SpecialToken": {"id": "\0", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        write_json(
            directory / _TOKENIZER_FILE,
            {
                "version": "1.0",
                "added_tokens": [separator],
                "pre_tokenizer": byte_level,
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": single,
                    "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
                    "special_tokens": {"\0": {"id": "\0", "ids": [SEPARATOR], "tokens": ["\0"]}},
                },
                "decoder": byte_level,
                "model": {"type": "BPE", "vocab": _make_byte_vocab(), "merges": []},
            },
        )
        _write_tokenizer_config(directory, "\0")


class BPETokenizer:
    """Byte-pair encoding (BPE), read from a `tokenizer.json`, for a model with `vocab` tokens.

    Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units", 2016.

    **Raises** `ValueError` if the file is not a byte-level or byte-fallback BPE, or has more than `vocab` tokens.
    """

    def __init__(self, path: Path, vocab: int, separator: int = SEPARATOR):
        self.vocab, self.separator = vocab, separator
        self.cache_key = f"{vocab} {separator} {hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()}"
        self._path = path
        self._tokenizer = import_optional("tokenizers", "pip install 'equizoo[text]'").Tokenizer.from_file(str(path))
        # A checkpoint's file may set these. Documents are neither truncated nor padded, and the text of a special token
        # within a document is plain text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._words = {index: word for word, index in self._tokenizer.get_vocab(with_added_tokens=True).items()}
        if max(self._words) >= vocab:
            raise ValueError(f"{path} holds {max(self._words) + 1} tokens, more than the vocabulary of {vocab}")
        added = self._tokenizer.get_added_tokens_decoder()
        text_of = _make_token_decoder(path)
        # A short corpus has fewer than `vocab` pairs: the remaining tokens decode to nothing.
        self._texts = [b""] * vocab
        for index, word in self._words.items():
            if index not in added:
                self._texts[index] = text_of(word)
            elif not added[index].special:
                self._texts[index] = word.encode()
        self._texts[separator] = b""
        self.token_bytes = np.array([len(text) for text in self._texts], np.int64)

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
            yield np.array(self._tokenizer.encode(document.decode(), add_special_tokens=False).ids, np.int64)

    def decode(self, tokens: Integer[np.ndarray, "tokens"]) -> bytes:
        return b"".join(self._texts[token] for token in tokens.tolist())

    def save(self, directory: Path) -> None:
        for path in sorted({path for pattern in _TOKENIZER_FILE_PATTERNS for path in self._path.parent.glob(pattern)}):
            shutil.copyfile(path, directory / path.name)
        if not (self._path.parent / _TOKENIZER_CONFIG_FILE).exists():
            _write_tokenizer_config(directory, self._words[self.separator])


def read_tokenizer(directory: Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint directory from its `tokenizer.json` and `config.json`.

    The separator is `bos_token_id` or, if that is not set, `eos_token_id`.

    **Raises** `FileNotFoundError` if a file is missing, and `ValueError` if the two do not match.
    """
    path, config = directory / _TOKENIZER_FILE, directory / "config.json"
    for file in (path, config):
        if not file.exists():
            raise FileNotFoundError(f"{file}: there is no such file, which says how text becomes the model's tokens")
    tokens, facts = read_json(path), read_json(config)
    vocab, words = facts.get("vocab_size"), tokens["model"].get("vocab", {})
    # The vocabulary is a mapping, or a list in the order of ids, depending on the type of the model.
    ids = [*(words.values() if isinstance(words, dict) else range(len(words)))]
    count = 1 + max(ids + [token["id"] for token in tokens.get("added_tokens", ())], default=-1)
    if not isinstance(vocab, int) or count > vocab:
        raise ValueError(
            f"{path} has {count} tokens, and the model that {config} describes knows {vocab}: they are not of one "
            "checkpoint"
        )
    if words == _make_byte_vocab() and not tokens["model"].get("merges"):
        return ByteTokenizer()
    named = facts.get("bos_token_id"), facts.get("eos_token_id")
    separators = [token for entry in named for token in (entry if isinstance(entry, list) else [entry])]
    separator = next((token for token in separators if token is not None), None)
    if separator is None or not 0 <= separator < vocab:
        raise ValueError(
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


def _make_token_decoder(path: Path) -> Callable[[str], bytes]:
    """Return the function from a token's spelling to its bytes, for byte-level and byte-fallback decoders.

    **Raises** `ValueError` for any other decoder.
    """
    letters, decoder = _unicode_to_bytes(), json.dumps(read_json(path).get("decoder"))
    if '"ByteLevel"' in decoder:
        return lambda word: bytes(letters[letter] for letter in word)
    if '"ByteFallback"' in decoder:
        byte = re.compile("<0x([0-9A-F]{2})>")
        return lambda word: bytes.fromhex(m[1]) if (m := byte.fullmatch(word)) else word.replace("▁", " ").encode()
    raise ValueError(f"{path}: its tokens are neither byte-level nor do they fall back to bytes, and we read no others")


def _write_tokenizer_config(directory: Path, separator: str) -> None:
    """Write `tokenizer_config.json`, which names the tokens that begin and end a text."""
    facts: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(directory / _TOKENIZER_CONFIG_FILE, facts | {"bos_token": separator, "eos_token": separator})
