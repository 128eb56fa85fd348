"""Text to token ids and back: bytes as they are, byte pairs learnt on the spot, or the tokens of a given checkpoint.

One token is the separator: it stands before every document. Where we choose, that is token 0, and its text is the NUL
byte, which no text holds.
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
"""What tools look for beside the weights to know the tokens of a checkpoint."""


@runtime_checkable
class Tokenizer(Protocol):
    """What a corpus asks of its tokens."""

    vocab: int
    separator: int
    token_bytes: Int[np.ndarray, "vocab"]
    """Bytes of text that each token stands for; 0 for the separator."""
    cache_key: str
    """Two tokenizers with the same key give the same tokens."""

    def encode_all(self, documents: Iterable[bytes]) -> Iterator[Integer[np.ndarray, "tokens"]]:
        """The tokens of each document, separators left out."""
        ...

    def decode(self, tokens: Integer[np.ndarray, "tokens"]) -> bytes:
        """The bytes that `tokens` stand for; separators stand for none."""
        ...

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json`, and what goes with it, into a checkpoint's directory."""
        ...


class ByteTokenizer:
    """One token a byte: a vocabulary of 256 that needs no training, and no package to be read."""

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
        begun = [{"SpecialToken": {"id": "\0", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        write_json(
            directory / _TOKENIZER_FILE,
            {
                "version": "1.0",
                "added_tokens": [separator],
                "pre_tokenizer": byte_level,
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": begun,
                    "pair": [*begun, {"Sequence": {"id": "B", "type_id": 0}}],
                    "special_tokens": {"\0": {"id": "\0", "ids": [SEPARATOR], "tokens": ["\0"]}},
                },
                "decoder": byte_level,
                "model": {"type": "BPE", "vocab": _make_byte_vocab(), "merges": []},
            },
        )
        _write_tokenizer_config(directory, "\0")


class BPETokenizer:
    """Byte-pair encoding as a `tokenizer.json` describes it, for a model of `vocab` tokens.

    Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units", 2016.

    **Raises** `ValueError` for a file that holds tokens of another kind, or more of them than `vocab`.
    """

    def __init__(self, path: Path, vocab: int, separator: int = SEPARATOR):
        self.vocab, self.separator = vocab, separator
        self.cache_key = f"{vocab} {separator} {hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()}"
        self._path = path
        self._tokenizer = import_optional("tokenizers", "pip install 'equizoo[text]'").Tokenizer.from_file(str(path))
        # A checkpoint's file may ask for these; a document is taken whole, and as text even where it names a token.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._words = {index: word for word, index in self._tokenizer.get_vocab(with_added_tokens=True).items()}
        if max(self._words) >= vocab:
            raise ValueError(f"{path} holds {max(self._words) + 1} tokens, more than the vocabulary of {vocab}")
        added = self._tokenizer.get_added_tokens_decoder()
        text_of = _make_token_decoder(path)
        # A text may be too short to find `vocab` pairs in: the tokens that are left over stand for nothing.
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
        """Learn `vocab` tokens from `documents` and write them to `path`: the same text gives the same tokens."""
        tokenizers = import_optional("tokenizers", "pip install 'equizoo[text]'")
        level = tokenizers.pre_tokenizers.ByteLevel
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = level(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab, special_tokens=["\0"], initial_alphabet=sorted(level.alphabet()), show_progress=False
        )
        tokenizer.train_from_iterator((document.decode() for document in documents), trainer)
        # whoever reads the file puts the separator in front of a text, as it stood in training
        begun = tokenizers.processors.TemplateProcessing(single="\0 $A", special_tokens=[("\0", SEPARATOR)])
        tokenizer.post_processor = begun
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
    """The tokens of a checkpoint: `tokenizer.json`, and what `config.json` says of the vocabulary and the separator,
    which is the token that begins a text or, where there is none, the one that ends it.

    **Raises** `FileNotFoundError` where one of the files is missing, and `ValueError` where they do not fit.
    """
    path, config = directory / _TOKENIZER_FILE, directory / "config.json"
    for file in (path, config):
        if not file.exists():
            raise FileNotFoundError(f"{file}: there is no such file, which says how text becomes the model's tokens")
    tokens, facts = read_json(path), read_json(config)
    vocab, words = facts.get("vocab_size"), tokens["model"].get("vocab", {})
    # Not every kind of tokens has a table here: a list has them in order.
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
    """The byte that each letter of a byte-level vocabulary stands for: printable ones themselves, the rest from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _make_byte_vocab() -> dict[str, int]:
    """The vocabulary of `Bytes` as a tokenizer.json has it: every byte by its letter, and the separator by itself."""
    return {"\0": SEPARATOR} | {
        letter: byte for letter, byte in sorted(_unicode_to_bytes().items()) if byte != SEPARATOR
    }


def _make_token_decoder(path: Path) -> Callable[[str], bytes]:
    """What a token's word stands for, by the two spellings there are. **Raises** `ValueError` for any other."""
    letters, decoder = _unicode_to_bytes(), json.dumps(read_json(path).get("decoder"))
    if '"ByteLevel"' in decoder:
        return lambda word: bytes(letters[letter] for letter in word)
    if '"ByteFallback"' in decoder:
        byte = re.compile("<0x([0-9A-F]{2})>")
        return lambda word: bytes.fromhex(m[1]) if (m := byte.fullmatch(word)) else word.replace("▁", " ").encode()
    raise ValueError(f"{path}: its tokens are neither byte-level nor do they fall back to bytes, and we read no others")


def _write_tokenizer_config(directory: Path, separator: str) -> None:
    """What tools need beside tokenizer.json: which of its tokens begins and ends a text."""
    facts: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(directory / _TOKENIZER_CONFIG_FILE, facts | {"bos_token": separator, "eos_token": separator})
