"""Python's standard library as records, texts or chats: data sets that need no download."""

import ast
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zoo.text.corpus import find_standard_library


def read_standard_library() -> list[dict]:
    """Return a record of text for each source of the standard library that is not empty, as `load_text()` reads them:
    about ten million characters."""
    texts = [path.read_text(encoding="utf-8", errors="replace") for _, path in find_standard_library()]
    return [{"text": text} for text in texts if text.strip()]


def read_docstrings() -> list[dict]:
    """Return a chat for each public function and class of the standard library that has a docstring.

    The question is "What does `fileinput.lineno` do?", the answer the first paragraph of the docstring: 73 characters
    on average. Python 3.11 has 5,011. Sources are parsed, not imported.
    """
    chats = []
    for name, path in find_standard_library():
        parts = name.removesuffix(".py").removesuffix("/__init__").split("/")
        if any(part.startswith("_") for part in parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # files that test the parser
            continue
        for qualified, answer in _walk_docstrings(tree, ".".join(parts)):
            question = {"role": "user", "content": f"What does `{qualified}` do?"}
            chats.append({"messages": [question, {"role": "assistant", "content": answer}]})
    return chats


def exchange_words(chats: Sequence[Mapping[str, Any]]) -> list[dict]:
    """Return a preference pair for each chat of a question and an answer: the answer is chosen, and rejected with two
    neighboring words exchanged, at random places that are the same in each call. Answers of one word are left out."""
    pick = random.Random(0)
    pairs = []
    for chat in chats:
        question, answer = chat["messages"]
        words = answer["content"].split()
        place = pick.randrange(len(words))
        words[place : place + 2] = reversed(words[place : place + 2])
        rejected = {**answer, "content": " ".join(words)}
        if rejected != answer:
            pairs.append({"prompt": [question], "chosen": [answer], "rejected": [rejected]})
    return pairs


def _walk_docstrings(tree: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the qualified name and the first paragraph of each docstring."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        name = f"{prefix}.{node.name}"
        paragraph = (ast.get_docstring(node) or "").partition("\n\n")[0]
        if paragraph.strip():
            yield name, " ".join(paragraph.split())
        if isinstance(node, ast.ClassDef):
            yield from _walk_docstrings(node, name)
