"""Markdown tables of docs/gpu.md from the rows of checks."""

from collections.abc import Callable
from typing import Any

from scripts.benchmarks.measure import peak_of

from .check import Row, find_lacking
from .checks import CHECKS


def format_page(rows: list[Row]) -> str:
    """Format the rows of each card: a table per check with its rivals, and what has not run."""
    cards = dict.fromkeys(row["card"] for row in rows if "card" in row)
    return "\n".join(format_card(card, [row for row in rows if row.get("card", card) == card]) for card in cards)


def format_card(card: str, rows: list[Row]) -> str:
    """Format the tables of one card."""
    dates = sorted({row["date"] for row in rows})
    versions = dict.fromkeys(f"{name} {version}" for row in rows for name, version in row.get("versions", {}).items())
    lines = [f"### {card}", "", f"Measured on {' and '.join(dates)}; {', '.join(versions)}.", ""]
    found = {row["name"]: row for row in rows if "failed" not in row}
    rates = {name: row["amount"] / row["shortest"] for name, row in found.items() if "amount" in row}
    for check in (check for check in CHECKS if check.title):
        names = [each.name for each in CHECKS if each.name.partition("/")[0] == check.name]
        own = [row for row in rows if row["check"] in names and row["name"]]
        timed = [derive(row, found, rates, card) for row in own if "failed" not in row]
        if not timed:
            continue
        lines += [f"**{check.title}.**", "", *format_table(timed), ""]
        for row in timed:
            if "scopes" in row:
                lines += [f"Where the time of `{row['name']}` goes, by the profiler:", "", *format_scopes(row), ""]
        if failed := [row for row in own if "failed" in row]:
            lines += [f"- {row['name']}: {row['failed']}" for row in failed] + [""]
    return "\n".join([*lines, *list_missing(rows)])


def list_missing(rows: list[Row]) -> list[str]:
    """List the checks of which no program has run, with the reason if there is one."""
    lines = []
    for check in CHECKS:
        own = [row for row in rows if row["check"] == check.name]
        if not any("failed" not in row for row in own):
            reason = next((row["failed"] for row in reversed(own)), "")
            lines.append(f"- `{check.name}`{f': {reason}' if reason else ''}")
        elif lacking := find_lacking(check, rows, toy=False):
            lines.append(f"- `{check.name}`: {len(lacking)} of {len(check.programs())} programs")
    return ["Not run yet:", "", *lines, ""] if lines else []


def derive(row: Row, found: dict[str, Row], rates: dict[str, float], card: str) -> Row:
    """Add rates and shares to a row: of the data sheet's products, of the measured copy, of the rival's time."""
    row = dict(row)
    seconds = row.get("median")
    if seconds and row.get("tokens"):
        row["tokens_per_second"] = row["tokens"] / seconds
    if seconds and row.get("flops") and (peak := peak_of(card)):
        row["utilization"] = row["flops"] / seconds / peak
    if seconds and row.get("bytes_needed") and "copy" in rates:
        row["copy_share"] = row["bytes_needed"] / seconds / rates["copy"]
    if row["name"] in rates:
        row["rate"] = rates[row["name"]]
    rival = found.get(row.get("rival") or "")
    if seconds and rival:
        row["ratio"] = seconds / rival["median"]
    if row.get("errors"):
        row["error"] = max(row["errors"])
    return row


def _format_rate(value: float) -> str:
    return f"{value / 1e12:,.2f} T/s"


def _format_seconds(value: float) -> str:
    return f"{value:#.3g} s" if value >= 0.1 else f"{1e3 * value:#.3g} ms"


def _format_bytes(value: float) -> str:
    return f"{value / 1e9:.1f} GB"


COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("median", "median", _format_seconds),
    ("shortest", "shortest", _format_seconds),
    ("at_least", "planned, at least", _format_seconds),
    ("in_turns", "planned, in turns", _format_seconds),
    ("rate", "FLOP/s, or bytes/s", _format_rate),
    ("tokens_per_second", "tokens/s", "{:,.0f}".format),
    ("utilization", "utilization", "{:.0%}".format),
    ("copy_share", "of the copy's rate", "{:.0%}".format),
    ("peak", "peak memory", _format_bytes),
    ("planned_peak", "planned peak", _format_bytes),
    ("first", "first call", _format_seconds),
    ("later", "later call", _format_seconds),
    ("error", "largest error", "{:.0e}".format),
    ("verdict", "verdict", str),
    ("ratio", "of the rival's time", "{:.2f}".format),
)
"""Keys of rows, headers, and how to write a value. A table has the columns of which it has a value."""


def format_table(rows: list[Row]) -> list[str]:
    columns = [column for column in COLUMNS if any(row.get(column[0]) is not None for row in rows)]
    lines = [f"| | {' | '.join(header for _, header, _ in columns)} |", "|---" + "|--:" * len(columns) + "|"]
    for row in rows:
        cells = [write(row[key]) if row.get(key) is not None else "–" for key, _, write in columns]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return lines


def format_scopes(row: Row) -> list[str]:
    lines = ["| pass | module | time | share |", "|---|---|--:|--:|"]
    for phase, module, seconds in row["scopes"]:
        lines.append(f"| {phase} | {module} | {_format_seconds(seconds)} | {seconds / row['traced']:.0%} |")
    return lines
