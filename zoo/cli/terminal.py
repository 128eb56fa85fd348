"""Numbers and tables as a terminal shows them."""

import itertools
from collections.abc import Collection, Sequence


def align_columns(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), gap: str = "  ") -> list[str]:
    """A line for each row, its cells one below the other; those of the columns `right` end in line. A row may have
    fewer cells than others, and its last one may be as long as it likes."""
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
    """Bytes in decimal units, three digits: `2.47 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count = count / 1000
    return f"{count:.3g} TB"


def format_ranges(numbers: Sequence[int]) -> str:
    """Which numbers these are, in few words: `0-31`, `0-30 by 2`, `0-4, 6-10`, `10 of 0-59`."""
    found = sorted(set(numbers))
    steps = {after - before for before, after in itertools.pairwise(found)}
    if len(steps) <= 1:
        step = steps.pop() if steps else 0
        return f"{found[0]}" if not step else f"{found[0]}-{found[-1]}" + (f" by {step}" if step > 1 else "")
    parts, start = [], found[0]
    for before, after in zip(found, [*found[1:], -1], strict=True):
        if after != before + 1:
            parts.append(f"{start}-{before}" if before > start else f"{before}")
            start = after
    return ", ".join(parts) if len(parts) <= 3 else f"{len(found)} of {found[0]}-{found[-1]}"
