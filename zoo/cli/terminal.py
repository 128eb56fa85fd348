"""Format tables, byte counts and ranges for the terminal."""

import itertools
from collections.abc import Collection, Sequence


def align_columns(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), gap: str = "  ") -> list[str]:
    """Return one line per row with aligned columns; those in `right` are aligned right.

    A row may have fewer cells than the others; its last cell then does not widen its column.
    """
    widths: dict[int, int] = {}
    for row in rows:
        for column, cell in enumerate(row if len(row) == max(map(len, rows)) else row[:-1]):
            widths[column] = max(widths.get(column, 0), len(cell))
    lines = []
    for row in rows:
        cells = [
            cell.rjust(widths.get(column, 0)) if column in right else cell.ljust(widths.get(column, 0))
            for column, cell in enumerate(row)
        ]
        lines.append(gap.join(cells).rstrip())
    return lines


def format_bytes(count: float | int) -> str:
    """Format bytes in decimal units with three digits: `2.47 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count = count / 1000
    return f"{count:.3g} TB"


def format_ranges(numbers: Sequence[int]) -> str:
    """Abbreviate a set of numbers: `0-31`, `0-30 by 2`, `0-4, 6-10`, `10 of 0-59`."""
    ordered = sorted(set(numbers))
    steps = {after - before for before, after in itertools.pairwise(ordered)}
    if len(steps) <= 1:
        step = steps.pop() if steps else 0
        return f"{ordered[0]}" if not step else f"{ordered[0]}-{ordered[-1]}" + (f" by {step}" if step > 1 else "")
    parts, start = [], ordered[0]
    for before, after in zip(ordered, [*ordered[1:], -1], strict=True):
        if after != before + 1:
            parts.append(f"{start}-{before}" if before > start else f"{before}")
            start = after
    return ", ".join(parts) if len(parts) <= 3 else f"{len(ordered)} of {ordered[0]}-{ordered[-1]}"
