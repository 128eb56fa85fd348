"""Load a `tokenizer.json`, which may come from anywhere, with one class of errors."""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zoo._files import JSON_BYTES, read_limited
from zoo._optional import import_optional

TOKENIZER_FILE = "tokenizer.json"
PROBE = 'Hello, world! 1 + 1 = 2;\n\tnaïve λ ✓ "x"'
"""A text that is tokenized to try a tokenizer."""


class TokenizerError(ValueError):
    """Raised for a tokenizer that cannot be read or does not fit its model. The message names the file and the
    fault."""


@contextlib.contextmanager
def name_faults(path: Path, fault: str) -> Iterator[None]:
    """Turn errors into one `TokenizerError` with the file's name. A missing file stays a `FileNotFoundError`.

    The package `tokenizers` raises plain `Exception`s, and panics that derive from `BaseException` only.
    """
    try:
        yield
    except (FileNotFoundError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit, TokenizerError):
        raise
    except BaseException as error:
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        else:
            reason = str(error)
        reason = " ".join(reason.split()).removeprefix(f"{path} ")
        raise TokenizerError(f"{path} {fault}: {reason[:300] or type(error).__name__}") from None


def load_tokenizer(path: Path) -> tuple[Any, dict[str, Any], str]:
    """Return the `tokenizers.Tokenizer` of a file, its JSON, and a digest of its bytes.

    Padding and truncation, which a file may ask for, are off.

    **Raises** `ImportError` if the package `tokenizers` is not installed, `FileNotFoundError` for a missing file, and
    `TokenizerError` for a file that the package refuses, or reads as another tokenizer than the file describes.
    """
    with name_faults(path, "cannot be read"):
        content = read_limited(path, JSON_BYTES)
    tokenizers = import_optional("tokenizers", "pip install 'equizoo[text]'")
    with name_faults(path, "is not a readable tokenizer"):
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        facts = json.loads(content)
        _check_ids(tokenizer.get_vocab(), facts.get("added_tokens") or [])
        if dropout := getattr(tokenizer.model, "dropout", None):
            raise ValueError(f"`dropout` of {dropout} would tokenize one text in many ways")
        tokens = tokenizer.encode(PROBE).ids
        if unknown := [token for token in tokens if tokenizer.id_to_token(token) is None]:
            raise ValueError(f"it gives the token {unknown[0]}, which is not in its vocabulary")
        tokenizer.decode(tokens)
    return tokenizer, facts, hashlib.blake2b(content, digest_size=16).hexdigest()


def _check_ids(ids: Mapping[str, int], added_tokens: list[dict[str, Any]]) -> None:
    """Check mistakes that `tokenizers` accepts silently. **Raises** `ValueError` for two tokens with one id, and for an
    added token that gets another id than the file gives it."""
    owners: dict[int, str] = {}
    for word, index in ids.items():
        if owners.setdefault(index, word) != word:
            raise ValueError(f"{owners[index]!r} and {word!r} have the same id, {index}")
    for token in added_tokens:
        if ids.get(token["content"]) != token["id"]:
            raise ValueError(f"{token['content']!r} has the id {token['id']}, and is read as {ids[token['content']]}")
