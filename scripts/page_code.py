"""Split a page of the documentation into its prose and its code, as tests run it and notebooks show it."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

FENCE = re.compile(r"^( *)(`{3,})(?P<info>[^\n`]*)\n(?P<code>.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (no-run|fails)\b(?P<reason>.*?)-->\s*$")
COMMAND = re.compile(r"^ *\$ (zoo(?:\\\n|.)*)", re.MULTILINE)
FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)


@dataclass(frozen=True)
class Part:
    """A piece of a page: prose (with code that is not run), Python to run, or a console with `$ zoo ...` commands."""

    kind: Literal["prose", "python", "console"]
    line: int
    """Line of the page that `source` begins in."""
    source: str
    fails: bool = False
    """True for commands that must fail."""

    def list_commands(self) -> Iterator[tuple[int, str]]:
        """Yield the line of the page and the words of each command of a console, from "zoo" on.

        A row that ends with a backslash goes on in the next, as in a shell.
        """
        for command in COMMAND.finditer(self.source):
            line = self.line + self.source.count("\n", 0, command.start())
            yield line, re.sub(r" *\\\n *", " ", command[1]).rstrip()


def split_page(text: str) -> list[Part]:
    """Split a page of Markdown at the blocks of code that are run.

    A block of Python below `<!-- no-run: why -->` is prose; commands below `<!-- fails: why -->` must fail.

    **Raises** `ValueError` for a mark without a reason, or in the info string: the site would not render it.
    """
    parts: list[Part] = []
    start = 0
    for fence in FENCE.finditer(text):
        language, *options = fence["info"].split() or [""]
        line = text.count("\n", 0, fence.start("code")) + 1
        if not all("=" in option for option in options):
            raise ValueError(f"line {line - 1}: the site renders no fence of {fence['info']!r}")
        mark = MARK.search(text[: fence.start()])
        if mark is not None and not re.match(r": \S", mark["reason"]):
            raise ValueError(f"line {line - 1}: `<!-- {mark[1]}: why -->` needs a why")
        marked = mark[1] if mark else None
        is_python = language in ("python", "py", "python3") and marked != "no-run"
        if not is_python and language != "console":
            continue
        parts.append(Part("prose", text.count("\n", 0, start) + 1, text[start : fence.start()]))
        indent = len(fence[1])
        source = "".join(row[indent:] or "\n" for row in fence["code"].splitlines(keepends=True))
        parts.append(Part("python" if is_python else "console", line, source, marked == "fails"))
        start = fence.end()
    return [*parts, Part("prose", text.count("\n", 0, start) + 1, text[start:])]


def list_code(text: str) -> list[tuple[int, str]]:
    """Return the first line and the source of each block to run; a command as a call of `command(words, fails)`."""
    found: list[tuple[int, str]] = []
    for part in split_page(text):
        if part.kind == "python":
            found.append((part.line, part.source))
        elif part.kind == "console":
            for line, words in part.list_commands():
                found.append((line, f"command({shlex.split(words)[1:]}, {part.fails})\n"))
    return found
