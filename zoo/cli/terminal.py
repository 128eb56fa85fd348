"""Format tables and byte counts for the terminal."""

from collections.abc import Collection, Sequence

from zoo._terminal import format_bytes as format_bytes


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
