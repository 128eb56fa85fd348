"""MkDocs hook: mark tables that are too wide for a phone, and name the column of each of their cells.

The style sheet shows a marked table on a narrow screen as one block a row, with the name of the column before each
cell. scripts/browse_site.py finds tables that are cut off all the same.
"""

import html
import re

TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
ROW = re.compile(r"<tr>(.*?)</tr>", re.DOTALL)
CELL = re.compile(r"<(?P<tag>t[hd])(?P<attributes>[^>]*)>(?P<content>.*?)</(?P=tag)>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
PHONE = 50
"""Characters of a table's text that fit beside each other on a screen of 420 pixels."""
GAP = 1
"""Characters between two columns."""
TALL = 4
"""Lines of a phone beyond which a cell of words in a narrow column reads badly."""


def read_text(cell: str) -> str:
    """Return the text of a cell, without its tags."""
    return " ".join(html.unescape(TAG.sub("", cell)).split())


def fits_phone(rows: list[list[re.Match[str]]]) -> bool:
    """Return whether a table is readable on a narrow screen as it is: no cell wider or much taller than its place."""
    least = []
    longest = []
    for column in zip(*rows, strict=True):
        texts = [read_text(cell["content"]) for cell in column]
        is_number = "right" in column[-1]["attributes"]
        pieces = texts if is_number else [word for text in texts for word in text.split()]
        least.append(max(map(len, pieces), default=0))
        longest.append(max(map(len, texts)))
    room = PHONE - GAP * (len(least) - 1)
    if sum(least) > room:
        return False
    wanted = sum(longest)
    if wanted <= room:
        return True
    # Browsers share what is left over the narrowest widths in proportion to what the columns want.
    spare = (room - sum(least)) / max(wanted - sum(least), 1)
    widths = [low + spare * (high - low) for low, high in zip(least, longest, strict=True)]
    return len(least) <= 2 or all(high / width <= TALL for high, width in zip(longest, widths, strict=True))


def stack_table(table: str) -> str:
    """Mark a table and label its cells, or return it as it is if it fits."""
    rows = [list(CELL.finditer(row)) for row in ROW.findall(table)]
    if fits_phone(rows):
        return table
    names = [html.escape(read_text(cell["content"])) for cell in rows[0]]

    def label(row: re.Match[str]) -> str:
        labels = iter(names)
        return CELL.sub(
            lambda cell: (
                f'<{cell["tag"]}{cell["attributes"]} data-label="{next(labels)}">{cell["content"]}</{cell["tag"]}>'
            ),
            row[0],
        )

    head, end, body = table.partition("</thead>")
    return head.replace("<table>", "<table data-stacked>", 1) + end + ROW.sub(label, body)


def on_page_content(content: str, **_) -> str:
    """Label the cells of a page's wide tables."""
    return TABLE.sub(lambda table: stack_table(table[0]), content)
