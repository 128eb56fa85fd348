"""Text corpora: read from files, split by hash, tokenized once, then memory-mapped.

    corpus = load_text()                                    # Python's own standard library, as bytes
    corpus = load_text("books", vocab=4096)                 # files and folders, with a BPE trained on them
    corpus = load_text({"a": "...", "b": "..."})            # texts by name
    corpus = load_text(tokenizer=read_tokenizer(folder))    # with the tokenizer of a checkpoint
    print(corpus)                                           # sizes, and how many files were skipped
    corpus.train, corpus.validation                         # see batches.py
    corpus.decode(corpus.encode("def main():"))

A document is a UTF-8 file or a named text. About one in twenty is held out for validation, chosen by a hash of its name
and bytes: the same documents on every machine, whatever else the corpus contains.
"""

import hashlib
import lzma
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Int, Integer

from zoo._files import open_regular, user_cache_folder, walk_files
from zoo._terminal import format_count

from .batches import CorpusSplit
from .records.find_files import describe_conversion, find_table, holds_records
from .remote_files import download, is_url
from .run_data import LossUnit
from .token_cache import choose_token_dtype, open_cache
from .tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, encode_utf8, require_tokenizer, train_bpe

_CACHE_VERSION = 4  # raised whenever the format of the cache changes
_VALIDATION_FRACTION = 1 / 20
_PASSAGE_BYTES = 32 * 2**10
_MIN_FILES = 20
_BPE_TRAINING_BYTES = 32 * 2**20
_MAX_XZ_BYTES = 16 * 2**20
_HOW_TO_GIVE_TEXTS = "texts themselves go in a mapping, {'name': text}"


@dataclass(frozen=True)
class Corpus:
    """A tokenized text with a training and a validation split.

    - `xz_bits_per_byte`: the size of the validation text under `xz -9e`, a baseline to show next to a model's loss.
    - `num_texts`: files or texts that were read; `num_binary`: files skipped for a NUL or for not being UTF-8.
    - `directory`: the cached tokens. Its name is a hash of everything they depend on.
    - `digest`: a hash of the tokens of both splits. A run keeps it, and is not resumed on another text.
    """

    train: CorpusSplit
    validation: CorpusSplit
    tokenizer: Tokenizer
    xz_bits_per_byte: float
    num_texts: int
    num_binary: int
    directory: Path
    digest: str

    @property
    def prompt_end(self) -> str:
        """Nothing: a sample goes on where its prompt ends."""
        return ""

    @property
    def unit(self) -> LossUnit:
        """Unit of losses."""
        return "bits per byte"

    @property
    def metric(self) -> str:
        """Name of a loss in this unit among the metrics."""
        return "bits_per_byte"

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """No tokens: samples of text go on behind the end of a document."""
        return ()

    @property
    def baselines(self) -> dict[str, float]:
        """Losses to compare a model's with, in `unit`."""
        return {"xz -9e": self.xz_bits_per_byte}

    @property
    def vocab(self) -> int:
        """Size of the vocabulary, separator included."""
        return self.tokenizer.vocab

    def encode(self, text: str) -> Int[np.ndarray, "tokens"]:
        """Tokenize `text`, without a separator."""
        return next(iter(self.tokenizer.encode_all([encode_utf8(text)]))).astype(np.int32)

    def encode_prompt(self, prompt: str) -> Int[np.ndarray, "tokens"]:
        """Tokenize a prompt that starts a document."""
        return np.append(self.tokenizer.separator, self.encode(prompt))

    def save(self, directory: Path) -> None:
        """Write the tokenizer into a checkpoint directory."""
        self.tokenizer.save(directory)

    def decode(self, tokens: Integer[np.ndarray, "tokens"] | Integer[Array, "tokens"]) -> str:
        """Decode `tokens` without separators; bytes that are not UTF-8 become U+FFFD."""
        tokens = np.asarray(tokens)
        return self.tokenizer.decode(tokens[tokens != self.tokenizer.separator])

    def __str__(self) -> str:
        parts = (f"{split.name} {split.text_bytes:,} bytes" for split in (self.train, self.validation))
        skipped = f", {self.num_binary} skipped as binary" if self.num_binary else ""
        parts = [
            f"{format_count(self.num_texts, 'text')}{skipped}",
            *parts,
            f"vocabulary {self.vocab:,}",
            f"xz {self.xz_bits_per_byte:.3f} bits per byte",
        ]
        return ", ".join(parts)


def load_text(
    source: str | Path | Sequence[str | Path] | Mapping[str, str] = (),
    *,
    vocab: int = 256,
    tokenizer: Tokenizer | None = None,
    cache: str | Path | None = None,
) -> Corpus:
    """Load, split and tokenize text.

    - `source`: a file or folder, several of them, or a mapping from names to texts. Also a URL, `s3://bucket/books` or
      `gs://bucket/*.txt`, which is copied first (`zoo.text.remote_files`). Empty: this Python's standard library.
    - `vocab`: 256 for bytes, more to train a BPE. Ignored with a `tokenizer`.
    - `cache`: a folder for the tokens, in a subfolder named by a hash of everything they depend on. By default
      `equizoo/text` in the user's cache folder. Cached tokens are verified, and damaged ones made again.

    **Raises** `FileNotFoundError` for a missing path, and `ValueError` for a path without text, a file that cannot be
    read, files of records, tables, text that cannot be split or changes while it is read, or a vocabulary below 256.
    """
    if vocab < 256:
        raise ValueError(f"a vocabulary of {vocab} cannot write every byte: take 256 for bytes, more for byte pairs")
    if tokenizer is not None:
        require_tokenizer(tokenizer)
    if isinstance(source, str | Path):
        source = (source,)
    if source:
        documents, texts, binary = _read_sources(source)
    else:
        documents, texts, binary = _read_documents(find_standard_library(), "the standard library")
    train, validation = _split_by_hash(documents)
    vocab_key = vocab if tokenizer is None else tokenizer.cache_key
    digest = hashlib.blake2b(f"{_CACHE_VERSION} {vocab_key}".encode(), digest_size=12)
    for document in documents:
        digest.update(document.digest)
    directory = Path(cache or user_cache_folder() / "text") / digest.hexdigest()
    about, digests = open_cache(directory, lambda part: _write_tokens(part, train, validation, vocab, tokenizer))
    if tokenizer is None:
        if vocab == 256:
            tokenizer = ByteTokenizer()
        else:
            tokenizer = FileTokenizer(directory / "tokenizer.json", vocab)
    text_digest = hashlib.blake2b(f"{digests['train.bin']} {digests['validation.bin']}".encode(), digest_size=16)
    text_digest = text_digest.hexdigest()

    def split(name: str) -> CorpusSplit:
        tokens = np.memmap(directory / f"{name}.bin", choose_token_dtype(tokenizer.vocab), "r")
        size = about[name]["bytes"]
        count = about[name]["tokens"]
        return CorpusSplit(name, tokens, tokenizer.token_bytes, size, count, tokenizer.separator, text_digest)

    return Corpus(
        split("train"), split("validation"), tokenizer, about["xz"], texts, binary, directory, digest=text_digest
    )


@dataclass(frozen=True)
class _Document:
    """Bytes `start` to `stop` of a file or text, with a hash of its name and these bytes."""

    name: str
    source: Path | bytes
    start: int
    stop: int
    digest: bytes

    def read(self) -> bytes:
        """**Raises** `ValueError` if the file has changed since it was found."""
        if isinstance(self.source, bytes):
            return self.source[self.start : self.stop]
        with open_regular(self.source) as file:
            file.seek(self.start)
            content = file.read(self.stop - self.start)
        if _digest_passage(self.name, content) != self.digest:
            raise ValueError(f"{self.source} changed while it was read: let nothing write to it, and try again")
        return content


def find_standard_library() -> list[tuple[str, Path]]:
    """Return name and path of each source of Python's standard library, without tests, tables, installed packages and
    machine-specific files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    folders = {"test", "tests", "idlelib", "encodings", "site-packages", "dist-packages", "__pycache__"}
    found = [(path.relative_to(root).as_posix(), path) for path in walk_files(root, folders) if path.suffix == ".py"]
    out = ("pydoc_data/topics.py", "_sysconfigdata")
    return sorted((name, path) for name, path in found if not name.startswith(out))


def _read_sources(source: Sequence[str | Path] | Mapping[str, str]) -> tuple[list[_Document], int, int]:
    if isinstance(source, Mapping):
        for name, written in source.items():
            if not isinstance(name, str) or not isinstance(written, str):
                raise TypeError(
                    f"{name!r}: a mapping of texts has names and texts, both str, not {type(name).__name__} and "
                    f"{type(written).__name__}"
                )
        documents = [(name, encode_utf8(written, f"text {name!r}")) for name, written in source.items()]
        return _read_documents(documents, "the texts given")
    found = []
    for path in source:
        if isinstance(path, str | Path) and is_url(path):
            path = download(path)
        _require_path(path)
        path = Path(path)
        if holds_records(path):
            raise ValueError(
                f"{path}: expected text, and these are records: `train.load_records` reads them, and "
                "`recipes/sft.py` fine-tunes on them"
            )
        if (table := find_table(path)) is not None:
            raise ValueError(
                f"{path}: expected text, and this is a table: {describe_conversion(table)} makes records of it, "
                "which `train.load_records` reads (`field=` names the column of text)"
            )
        if path.is_dir():
            found += [(file.relative_to(path).as_posix(), file) for file in walk_files(path)]
        else:
            found.append((path.name, path))
    return _read_documents(found, ", ".join(map(str, source)))


def _require_path(source: Any) -> None:
    """**Raises** `TypeError` for a source that is not a path, `FileNotFoundError` for a missing path, which may be a
    text."""
    if not isinstance(source, str | Path):
        raise TypeError(f"expected a path to read text from, got {type(source).__name__}; {_HOW_TO_GIVE_TEXTS}")
    try:
        is_there = Path(source).exists()
    except OSError:  # longer than a name can be
        is_there = False
    if not is_there:
        shown = str(source)
        if len(shown) > 200:
            shown = f"{shown[:60]!r}..."
        raise FileNotFoundError(f"{shown}: there is no such file or folder to read text from; {_HOW_TO_GIVE_TEXTS}")


def _read_documents(named_sources: Sequence[tuple[str, Path | bytes]], origin: str) -> tuple[list[_Document], int, int]:
    """Return the documents, sorted by name, and the numbers of text and binary sources."""
    documents = []
    texts = []
    binary = 0
    for name, source in sorted(named_sources):
        content = _read_content(source)
        if content and _is_text(content):
            texts.append((name, source))
            documents.append(_make_document(name, source, content, 0, len(content)))
        else:
            binary += bool(content)
    if not texts:
        raise ValueError(
            f"{origin}: no text there: {binary} files hold NUL bytes or are not UTF-8, all others are empty"
        )
    if len(texts) < _MIN_FILES:
        # A hash cannot split a corpus of a few large documents.
        documents = [passage for name, source in texts for passage in _cut_passages(name, source)]
    return documents, len(texts), binary


def _read_content(source: Path | bytes) -> bytes:
    """**Raises** `ValueError` for a pipe or a device, and for a file that cannot be opened, such as a broken link."""
    if isinstance(source, bytes):
        return source
    try:
        with open_regular(source) as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error.strerror}") from None


def _is_text(content: bytes) -> bool:
    try:
        return b"\0" not in content and bool(content.decode())
    except UnicodeDecodeError:
        return False


def _make_document(name: str, source: Path | bytes, content: bytes, start: int, stop: int) -> _Document:
    return _Document(name, source, start, stop, _digest_passage(name, content[start:stop]))


def _digest_passage(name: str, content: bytes) -> bytes:
    return hashlib.blake2b(name.encode() + b"\0" + content, digest_size=16).digest()


def _cut_passages(name: str, source: Path | bytes) -> Iterable[_Document]:
    """Cut a text at line ends into passages of at least `_PASSAGE_BYTES`."""
    content = _read_content(source)
    start = 0
    while start < len(content):
        stop = content.find(b"\n", start + _PASSAGE_BYTES) + 1 or len(content)
        yield _make_document(name, source, content, start, stop)
        start = stop


def _split_by_hash(documents: Sequence[_Document]) -> tuple[list[_Document], list[_Document]]:
    """Split into training and validation documents, each document only by its own hash."""
    if len(documents) < 2:
        raise ValueError(
            f"{documents[0].name}: a single passage of {documents[0].stop} bytes, which cannot be split for training "
            f"and validation: take more files, or more than {2 * _PASSAGE_BYTES:,} bytes"
        )
    quantile = {document: int.from_bytes(document.digest[:8], "big") / 2**64 for document in documents}
    held_out = {document for document in documents if quantile[document] < _VALIDATION_FRACTION}
    if not held_out or len(held_out) == len(documents):
        held_out = {min(documents, key=quantile.__getitem__)}
    return [d for d in documents if d not in held_out], [d for d in documents if d in held_out]


def _write_tokens(
    directory: Path,
    train: Sequence[_Document],
    validation: Sequence[_Document],
    vocab: int,
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """Write the tokens of both splits, and a trained BPE, to `directory`; return their metadata."""
    if tokenizer is None and vocab == 256:
        tokenizer = ByteTokenizer()
    elif tokenizer is None:
        tokenizer = train_bpe(_sample_documents(train), vocab, directory / "tokenizer.json")
    about: dict[str, Any] = dict(xz=_measure_xz(validation))
    for name, documents in (("train", train), ("validation", validation)):
        count = 0
        with (directory / f"{name}.bin").open("wb") as file:
            for tokens in tokenizer.encode_all(document.read() for document in documents):
                file.write(np.append(tokenizer.separator, tokens).astype(choose_token_dtype(tokenizer.vocab)).tobytes())
                count += len(tokens)
        about[name] = dict(bytes=sum(document.stop - document.start for document in documents), tokens=count)
    return about


def _sample_documents(documents: Sequence[_Document]) -> Iterable[bytes]:
    """Yield documents to train the BPE on: all, or a random sample of a large corpus."""
    total = 0
    for document in sorted(documents, key=lambda document: document.digest):
        if total > _BPE_TRAINING_BYTES:
            return
        total += document.stop - document.start
        yield document.read()


def _measure_xz(documents: Sequence[_Document]) -> float:
    """Compress the first `_MAX_XZ_BYTES` of the documents with `xz -9e`; return bits per byte."""
    content = b""
    for document in documents:
        content += document.read()
        if len(content) > _MAX_XZ_BYTES:
            break
    content = content[:_MAX_XZ_BYTES]
    return 8 * len(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)) / len(content)
