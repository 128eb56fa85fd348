"""Print text of unknown origin: names in a checkpoint, generated tokens, messages of errors.

`show` is the only way of this library to the terminal, besides its log, "zoo". Escape sequences and control characters
are shown, `\\x1b[2J`, and not obeyed; so are the characters that reverse the order of a line or hide in it.
"""

import logging
import os
import re
import select
import sys
from collections.abc import Collection, Sequence
from typing import Any

_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # C0, DEL and C1
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff"  # order of writing, line ends, zero width
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"  # annotations, halves of characters, tags
)
"""Joiners (U+200C, U+200D) are no control characters: emoji and several scripts need them."""


def escape_controls(text: str, *, keep: str = "") -> str:
    """Replace control characters by their escapes in Python, except those in `keep`."""

    def escape(found: re.Match[str]) -> str:
        if found[0] in keep:
            return found[0]
        return found[0].encode("unicode_escape").decode()

    return _CONTROLS.sub(escape, text)


def show(text: str = "", *, file: Any = None, end: str = "\n") -> None:
    """Print `text`, with control characters escaped except for line ends and tabs, and flush it.

    `file` is standard output by default.
    """
    print(escape_controls(text, keep="\n\t"), file=file, end=end, flush=True)


def show_error(text: str) -> None:
    """Print a message to standard error. Its further lines are indented: none looks like a message of its own."""
    show(re.sub(r"\n(?!  )", "\n  ", text), file=sys.stderr)


def _escape_record(record: logging.LogRecord) -> bool:
    """Escape the message of a log record, which names tensors, keys and files."""
    record.msg = escape_controls(record.getMessage(), keep="\n\t")
    record.args = None
    return True


logging.getLogger("zoo").addFilter(_escape_record)


def is_output_closed() -> bool:
    """Return True if standard output is a pipe that nobody reads any more, as after `| head`."""
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def discard_output() -> None:
    """Let standard output, and what it still buffers, go nowhere. Else Python complains at exit about a closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun: "1 text", "1,200 texts"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_bytes(count: float | int) -> str:
    """Format bytes in decimal units with three digits: `2.47 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count = count / 1000
    return f"{count:.3g} TB"


def align_columns(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), gap: str = "  ") -> list[str]:
    """Return one line per row with aligned columns; those in `right` are aligned right.

    A row may have fewer cells than the others; its last cell then does not widen its column.
    """
    num_columns = max(map(len, rows), default=0)
    widths = [0] * num_columns
    for row in rows:
        aligned = row if len(row) == num_columns else row[:-1]
        for column, cell in enumerate(aligned):
            widths[column] = max(widths[column], len(cell))
    lines = []
    for row in rows:
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=False)):
            cells.append(cell.rjust(width) if column in right else cell.ljust(width))
        lines.append(gap.join(cells).rstrip())
    return lines
