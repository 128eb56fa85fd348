"""Implement `zoo families`."""

import re
import shutil
import sys
from typing import Annotated

import tyro

from zoo._terminal import align_columns, show
from zoo.models.hf.families import FAMILIES, import_family_file
from zoo.models.hf.support import families as find_families


def families(*, verbose: Annotated[bool, tyro.conf.arg(aliases=("-v",))] = False) -> None:
    """List supported model families: model_type, class in transformers, description.

    A checkpoint's family is the model_type in its config.json. Lines are cut to the width of the terminal; a pipe gets
    all of them.

    Args:
        verbose: Print what is tested of each family, too, and the whole description with the papers.
    """
    support = find_families()
    rows = []
    for name, family in FAMILIES.items():
        summary = summarize_family(name)
        details = (str(support[name]), summary) if verbose else (_shorten(summary),)
        rows.append((name, family.architecture, *details))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in align_columns(rows):
        if width is not None and len(line) > width:
            line = line[: width - 3] + "..."
        show(line)


def _shorten(summary: str) -> str:
    """Return the first clause of a summary without its papers: parentheses with an arXiv number or a year."""
    plain = re.sub(r" \([^()]*(?:arXiv:|\b\d{4}\b)[^()]*\)", "", summary)
    return re.split(r"[.;](?: |$)", plain)[0]


def summarize_family(name: str) -> str:
    """Return the first paragraph of the docstring of a family's file."""
    text = import_family_file(name).__doc__ or ""
    return " ".join(text.partition("\n\n")[0].split())
