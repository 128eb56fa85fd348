"""The table of the documentation, written from what was measured."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START, END = "<!-- what scripts/bench.py measured -->", "<!-- until here -->"


def check(path: Path) -> None:
    """**Raises** `SystemExit` where `path` is no page with a place for the table: before anything is measured."""
    text = path.read_text() if path.is_file() else ""
    if START not in text or END not in text.partition(START)[2]:
        raise SystemExit(f"bench.py: {path} has no place for the table, between the lines {START} and {END}")


def write(path: Path, found: dict[str, Any], words: Sequence[str]) -> None:
    """Put the table between the page's two markers."""
    before, _, rest = path.read_text().partition(START)
    after = rest.partition(END)[2]
    path.write_text(f"{before}{START}\n{table(found, words)}{END}{after}")


def table(found: dict[str, Any], words: Sequence[str]) -> str:
    """Markdown: what was measured on, a table for each part, and the command that gives it."""
    machine, versions = found["machine"], found["versions"]
    names = ", ".join(f"{name} {version}" for name, version in {"jax": machine["jax"], **versions}.items())
    where = f"{machine['processor']}, {machine['cores']} cores" + (
        f", {machine['device']}" if "device" in machine else ""
    )
    lines = [
        "",
        f"Measured on {found['date']}: {where}; Python {machine['python']}, {names}; commit {machine['commit']}.",
        "",
    ]
    tunables = [f"GLIBC_TUNABLES={machine['GLIBC_TUNABLES']}"] if "GLIBC_TUNABLES" in machine else []
    lines += ["```bash", shlex.join([*tunables, "python", "scripts/bench.py", *words]), "```", ""]
    for part in dict.fromkeys(row["part"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["part"] == part]
        rates = found.get("ceilings", {}).get(part)
        lines += [f"**{part.capitalize()}.** {ceiling(rates)}" if rates else f"**{part.capitalize()}.**", ""]
        last = "more than a later step | to make the model" if "compiling" in rows[0] else "tokens/s | share"
        lines += [f"| | median | quartiles | shortest | {last} |", "|---|--:|--:|--:|--:|--:|"]
        lines += [cells(row) for row in rows] + [""]
    return "\n".join(lines) + "\n"


def ceiling(rates: dict[str, float]) -> str:
    products = " and ".join(
        f"{rates[f'matmul {dtype}'] / 1e9:,.0f} GFLOP/s in {dtype}" for dtype in ("float32", "bfloat16")
    )
    return (
        f"In the same rounds a single matrix product ran at {products}, and a copy at {rates['copy'] / 1e9:,.0f} GB/s."
    )


def cells(row: dict[str, Any]) -> str:
    last = f"{row.get('tokens_per_second', 0):,.0f} | {row.get('utilisation', row.get('share', 0)):.0%}"
    if "compiling" in row:
        last = f"{row['compiling']:#.3g} s | {row['born']:#.3g} s"
    times = f"{row['median']:#.3g} s | {row['low']:#.3g} to {row['high']:#.3g} | {row['shortest']:#.3g} s"
    return f"| {row['name']} | {times} | {last} |"
