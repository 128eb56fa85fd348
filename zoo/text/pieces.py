"""Pieces of a long document that have the tokens of the document, for tokenizers that split at ends of lines."""

import re
from collections.abc import Iterator
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_WORDS_AND_LINES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LINE_PATTERNS = tuple(_CONTRACTIONS + digits + _WORDS_AND_LINES for digits in (r"\p{N}{1,3}", r"\p{N}"))
"""Patterns of Llama 3 and of Qwen 2. As GPT-2's, they match a single line end before a letter without the letter, and
nothing before it depends on what follows."""
_LINE_END = re.compile(rb"[!-~]\n(?=[A-Za-z])")


def cut_at_lines(document: bytes, size: int) -> Iterator[bytes]:
    """Cut a document into pieces of at least `size` bytes, between a single line end and a letter. The tokens of all
    pieces are those of the document, in a fraction of the memory, if `splits_at_lines`."""
    start = 0
    while found := _LINE_END.search(document, start + size):
        yield document[start : found.end()]
        start = found.end()
    yield document[start:]


def splits_at_lines(facts: dict[str, Any]) -> bool:
    """Return True for a tokenizer that surely splits a text between a single line end and a letter, whatever is around
    them. `facts` is a parsed `tokenizer.json`."""
    if (facts.get("normalizer") or {"type": "NFC"}) != {"type": "NFC"}:
        return False
    added = [token for token in facts.get("added_tokens") or [] if not token["special"]]
    if any("\n" in token["content"] or token["lstrip"] or token["rstrip"] for token in added):
        return False
    splitter = facts.get("pre_tokenizer") or {}
    *before, level = splitter.get("pretokenizers") or [splitter]
    if level.get("type") != "ByteLevel" or level.get("add_prefix_space"):
        return False
    if not before:
        return level.get("use_regex", True)
    (split, *others) = before
    is_known = split.get("type") == "Split" and split.get("pattern") in [{"Regex": each} for each in LINE_PATTERNS]
    return is_known and not others and split.get("behavior") == "Isolated" and not split.get("invert")
