"""Implement `zoo report`."""

from pathlib import Path
from typing import Annotated

import tyro

from zoo._terminal import show


def report(directory: Annotated[Path, tyro.conf.Positional]) -> None:
    """Draw the report of a run again, from the files in its folder.

    After its report was lost, or with charts once matplotlib is installed. Nothing is computed.

    Args:
        directory: Folder of a run, such as runs/transformer, or of several runs that a recipe compared.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory}: there is no such folder")
    from zoo.tools.report.page import redraw_report  # which other commands do not need

    show(f"wrote the report to {redraw_report(directory)}")
