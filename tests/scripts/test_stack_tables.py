"""Tables that are too wide for a phone are marked, with the name of its column at each cell."""

import re

import markdown
import pytest

from scripts import stack_tables


def write_table(names, *rows, alignment="---"):
    """Return a table whose last columns, all but the first, have an alignment."""
    marks = ["---", *[alignment] * (len(names) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, marks, *rows))


LONG = "decay, per head or per channel, then the delta rule, " * 3
FITS = {
    "two columns": write_table(["name", "what it does"], ["`fit`", "trains a model on the rows of a file " * 5]),
    "numbers": write_table(["size", "a", "b", "c"], ["1,024", "0.25", "13.5 s", "2,048"], alignment="--:"),
    "short words": write_table(["a", "b", "c"], ["one two", "three four", "five six seven"]),
}
TOO_WIDE = {
    "one long word": write_table(["a", "b"], ["x", f"`{'y' * 60}`"]),
    "numbers that do not break": write_table(["a", "b", "c"], ["x", "1 " * 14, "2 " * 14], alignment="--:"),
    "tall cells in three columns": write_table(["a", "b", "c"], [LONG, LONG, "x"]),
}


def render(table: str) -> str:
    return stack_tables.on_page_content(markdown.markdown(table, extensions=["tables"]))


def test_cells_have_the_names_of_their_columns():
    rows = ["`GatedDeltaNet`", "one matrix", LONG * 2], ["<b>x</b>", "", "short"]
    found = render(write_table(["layer", "state", "`update` & read"], *rows))
    assert found.count("<table data-stacked>") == 1
    names = ["layer", "state", "update &amp; read"]
    assert re.findall(r'<td data-label="([^"]*)">', found) == 2 * names
    assert "data-label" not in found.partition("</thead>")[0]
    assert "<code>GatedDeltaNet</code>" in found and "<b>x</b>" in found


@pytest.mark.parametrize("table", FITS.values(), ids=FITS)
def test_tables_that_fit_stay(table):
    assert "<table>" in render(table) and "data-" not in render(table)


@pytest.mark.parametrize("table", TOO_WIDE.values(), ids=TOO_WIDE)
def test_tables_that_do_not_fit_are_marked(table):
    assert "data-stacked" in render(table)


def test_alignment_stays_beside_the_label():
    found = render(write_table(["a", "b"], ["x" * 60, "1"], alignment="--:"))
    (cell,) = re.findall(r"<td [^>]*right[^>]*>", found)
    assert cell.endswith(' data-label="b">')
