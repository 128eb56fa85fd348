"""The one reader of `tokenizer.json`, which may come from anywhere: checked first, with one class of errors.

file = TokenizerFile.read(directory / TOKENIZER_FILE)   # parsed and checked; needs no package
tokenizer = file.build()                                # tokenizers.Tokenizer, neither padding nor truncating
"""

import contextlib
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo._files import JSON_BYTES, parse_json, read_json, read_limited
from zoo._optional import import_optional

TOKENIZER_FILE = "tokenizer.json"
MAX_VOCAB = 2**24
"""Bound of vocabularies that are read, sixteen times the largest in use. Arrays of a vocabulary's length are made."""
PROBE = 'Hello, world! 1 + 1 = 2;\n\tnaïve λ ✓ "x"'
"""A text that is tokenized to try a tokenizer."""
_MAX_GROWTH = 64


class TokenizerError(ValueError):
    """A tokenizer that cannot be read or does not fit its model. The message names the file and the fault."""


@dataclass(frozen=True)
class TokenizerFile:
    """A checked `tokenizer.json`.

    - `facts`: the parsed file; `digest`: a hash of its bytes.
    - `ids`: token ids by spelling, added tokens included. They are distinct and below `MAX_VOCAB`.
    """

    path: Path
    content: bytes
    facts: dict[str, Any]
    digest: str
    ids: dict[str, int]

    @classmethod
    def read(cls, path: Path) -> "TokenizerFile":
        """Read and check a file. **Raises** `TokenizerError`, and `FileNotFoundError` if there is none."""
        with name_faults(path, "cannot be read"):
            content = read_limited(path, JSON_BYTES)
        with name_faults(path, "is not a readable tokenizer"):
            facts = parse_json(content, _make_object)
            ids = _read_ids(facts)
            for name in ("normalizer", "decoder"):
                if (growth := _measure_growth(facts.get(name))) > _MAX_GROWTH:
                    raise ValueError(f"its {name} makes a text {growth:,} times as long")
        return cls(path, content, facts, hashlib.blake2b(content, digest_size=16).hexdigest(), ids)

    @property
    def count(self) -> int:
        """Number of ids up to the largest, gaps included."""
        return 1 + max(self.ids.values(), default=-1)

    def build(self) -> Any:
        """Build the `tokenizers.Tokenizer`, without the padding and the truncation that a file may ask for.

        **Raises** `ImportError` if the package `tokenizers` is not installed, and `TokenizerError` if it cannot use the
        file: what it gives for a short text is tried.
        """
        tokenizers = import_optional("tokenizers", "pip install 'equizoo[text]'")
        with name_faults(self.path, "is not a readable tokenizer"):
            tokenizer = tokenizers.Tokenizer.from_buffer(self.content)
            tokenizer.no_truncation()
            tokenizer.no_padding()
            # An added token of another id than the file says would silently be read as the other.
            for word, index in self.ids.items():
                if tokenizer.token_to_id(word) != index:
                    raise ValueError(f"{word!r} has the id {index}, and is read as {tokenizer.token_to_id(word)}")
            tokens = tokenizer.encode(PROBE).ids
            if max(tokens, default=0) >= self.count:
                raise ValueError(f"it gives the token {max(tokens)}, and has {self.count}")
            tokenizer.decode(tokens)
        return tokenizer


@contextlib.contextmanager
def name_faults(path: Path, fault: str) -> Iterator[None]:
    """Turn errors into one `TokenizerError` with the file's name. A missing file stays a `FileNotFoundError`.

    The package `tokenizers` raises plain `Exception`s, and panics that derive from `BaseException` alone.
    """
    try:
        yield
    except (FileNotFoundError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit, TokenizerError):
        raise
    except BaseException as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = " ".join(reason.split()).removeprefix(f"{path} ")
        raise TokenizerError(f"{path} {fault}: {reason[:300] or type(error).__name__}") from None


def read_model_facts(path: Path) -> dict[str, Any]:
    """Read the `config.json` beside a tokenizer, with `vocab_size` checked.

    **Raises** `TokenizerError`, and `FileNotFoundError` if there is none.
    """
    with name_faults(path, "cannot be read"):
        facts = read_json(path)
        if not isinstance(facts, dict):
            raise ValueError(f"a JSON object was expected, not {type(facts).__name__}")
        vocab = facts.get("vocab_size")
        if not _is_id(vocab) or vocab == 0:
            raise ValueError(f"vocab_size is a number of tokens from 1 to {MAX_VOCAB - 1:,}, not {str(vocab)[:50]}")
    return facts


def _read_ids(facts: Any) -> dict[str, int]:
    """Return the ids of all tokens. **Raises** `ValueError` for tokens that are no text, or whose ids are unusable."""
    model = facts.get("model") if isinstance(facts, dict) else None
    if not isinstance(model, dict):
        raise ValueError("it has no object `model`")
    words, added = model.get("vocab"), facts.get("added_tokens") or []
    if isinstance(words, list):  # of pairs, in the order of their ids
        if not all(isinstance(pair, list) and pair and isinstance(pair[0], str) for pair in words):
            raise ValueError("its vocabulary is a list, and not of pairs of a text and a score")
        words = {pair[0]: index for index, pair in enumerate(words)}
    if not isinstance(words, dict):
        raise ValueError("its model has no `vocab`")
    if not isinstance(added, list) or not all(
        isinstance(token, dict) and isinstance(token.get("content"), str) and "id" in token for token in added
    ):
        raise ValueError("`added_tokens` is a list of objects with an id and a content")
    if model.get("dropout"):
        raise ValueError(f"`dropout` of {model['dropout']} would tokenize one text in many ways")
    ids = dict(words)
    for token in added:
        if ids.setdefault(token["content"], token["id"]) != token["id"]:
            raise ValueError(f"{token['content']!r} has two ids, {ids[token['content']]} and {token['id']}")
    for word, index in ids.items():
        if not _is_id(index):
            raise ValueError(f"the id of {word!r} is {str(index)[:50]}, and is from 0 to {MAX_VOCAB - 1:,}")
    if len(set(ids.values())) < len(ids):
        owners: dict[int, str] = {}
        first = next((word, other) for word, index in ids.items() if (other := owners.setdefault(index, word)) != word)
        raise ValueError(f"{first[1]!r} and {first[0]!r} have the same id, {ids[first[0]]}")
    return ids


def _measure_growth(step: Any) -> int:
    """Return an upper bound of how many times as long the replacements of a normalizer make a text. A chain of a few
    dozen, each doubling what it is given, would take all memory."""
    if isinstance(step, list):
        return math.prod(map(_measure_growth, step))
    if not isinstance(step, dict):
        return 1
    content = step.get("content")
    growth = max(len(content), 1) if step.get("type") == "Replace" and isinstance(content, str) else 1
    return growth * math.prod(_measure_growth(inner) for inner in step.values() if isinstance(inner, list))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_VOCAB


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build the dict of a JSON object. **Raises** `ValueError` for a name that occurs twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        raise ValueError(f"{next(name for name, _ in pairs if name in seen or seen.add(name))!r} occurs twice")
    return table
