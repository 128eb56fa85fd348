"""Reports on several runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from zoo._terminal import show

from .report.page import write_report


def report_runs(
    directory: Path,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    description: str,
    curves: Mapping[str, str] = MappingProxyType({"validation": "validation"}),
    unit: str = "bits per byte",
    **sections: Any,
) -> None:
    """Write `report.html` on the runs in subdirectories of `directory`, and print its table.

    - `rows`: the table, one row per run; "run" names its subdirectory.
    - `description`: the line below the title.
    - `curves`, `unit`, `sections`: arguments of `write_report`; by default the runs' "validation" in bits per byte.

    The first process alone writes.
    """
    if jax.process_index() != 0:
        return
    runs = {row["run"]: directory / row["run"] for row in rows}
    tables = {"Results": rows, **sections.pop("tables", {})}
    sections |= {"curves": curves, "unit": unit, "runs": runs, "tables": tables}
    path = write_report(directory, title=title, summary=description, **sections)
    cells = [list(rows[0]), *([_format_number(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    show()
    for line in cells:
        show("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    show(f"\nwrote the report to {path}")


def _format_number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}" if isinstance(value, float) else str(value)
