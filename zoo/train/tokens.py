"""Text to token ids and back: bytes as they are, or byte pairs learnt on the spot.

Token 0 is the separator in both: it stands before every document. Its text is the NUL byte, which no text holds.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Integer

from .optional import require

SEPARATOR = 0


@runtime_checkable
class Tokenizer(Protocol):
    """What a corpus asks of its tokens."""

    vocab: int
    lengths: Int[np.ndarray, "vocab"]
    """Bytes of text that each token stands for; 0 for the separator."""

    def encode_all(self, documents: Iterable[bytes]) -> Iterator[Integer[np.ndarray, "tokens"]]:
        """The tokens of each document, separators left out."""
        ...

    def decode(self, tokens: Integer[np.ndarray, "tokens"]) -> bytes:
        """The bytes that `tokens` stand for; separators stand for none."""
        ...


class Bytes:
    """One token a byte: a vocabulary of 256 that needs no training."""

    def __init__(self):
        self.vocab = 256
        self.lengths = (np.arange(256) != SEPARATOR).astype(np.int64)

    def encode_all(self, documents: Iterable[bytes]) -> Iterator[Integer[np.ndarray, "tokens"]]:
        return (np.frombuffer(document, np.uint8) for document in documents)

    def decode(self, tokens: Integer[np.ndarray, "tokens"]) -> bytes:
        return tokens[tokens != SEPARATOR].astype(np.uint8).tobytes()


class BytePairs:
    """Byte-level byte-pair encoding of `vocab` tokens, read from the `tokenizer.json` that `train` wrote.

    Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units", 2016.
    """

    def __init__(self, path: Path, vocab: int):
        self.vocab = vocab
        self._tokenizer = require("tokenizers", "pip install 'equizoo[text]'").Tokenizer.from_file(str(path))
        letters = _letters()
        words = {index: word for word, index in self._tokenizer.get_vocab(with_added_tokens=True).items()}
        if len(words) > vocab:
            raise ValueError(f"{path} holds {len(words)} tokens, more than the vocabulary of {vocab}")
        # A text may be too short to find `vocab` pairs in: the tokens that are left over stand for nothing.
        self._texts = [b""] + [bytes(letters[c] for c in words.get(index, "")) for index in range(1, vocab)]
        self.lengths = np.array([len(text) for text in self._texts], np.int64)

    @staticmethod
    def train(documents: Iterable[bytes], vocab: int, path: Path) -> "BytePairs":
        """Learn `vocab` tokens from `documents` and write them to `path`: the same text gives the same tokens."""
        tokenizers = require("tokenizers", "pip install 'equizoo[text]'")
        level = tokenizers.pre_tokenizers.ByteLevel
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = level(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab, special_tokens=["\0"], initial_alphabet=sorted(level.alphabet()), show_progress=False
        )
        tokenizer.train_from_iterator((document.decode() for document in documents), trainer)
        tokenizer.save(str(path))
        return BytePairs(path, vocab)

    def encode_all(self, documents: Iterable[bytes]) -> Iterator[Integer[np.ndarray, "tokens"]]:
        for document in documents:
            yield np.array(self._tokenizer.encode(document.decode(), add_special_tokens=False).ids, np.int64)

    def decode(self, tokens: Integer[np.ndarray, "tokens"]) -> bytes:
        return b"".join(self._texts[token] for token in tokens.tolist())


def _letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for: printable ones themselves, the rest from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
