"""Markdown tables of the documentation, written from measured rows."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START, END = "<!-- what scripts/bench.py measured -->", "<!-- until here -->"
HEADING = "### "
"""Mark of the heading over the tables of one processor."""
COLUMNS = {
    "compiling": ("more than a later step", "to make the model"),
    "copy_share": ("tokens/s", "GFLOP", "share of the product", "MB", "share of the copy"),
    "bytes_learning": ("tokens/s", "MB of parameters", "MB of gradients and moments", "MB else"),
    "bytes_remembered": ("tokens/s", "MB remembered"),
    "bytes_read": ("tokens/s", "MB/s"),
    "share": ("tokens/s", "share"),
    "utilization": ("tokens/s", "share"),
    "tokens_per_second": ("tokens/s",),
    "median": (),
}
"""Last columns of a part, by the first of these keys that its rows have."""
RATIO = "of the best rival's time"
"""Column of the median ratio in paired rounds."""


def start(place: str) -> str:
    """Return the first marker of a table, with its `place` if the page has several."""
    return START.replace(" -->", f": {place} -->") if place else START


def check(path: Path, place: str = "") -> None:
    """**Raises** `SystemExit` if `path` has no markers for the table. Called before anything is measured."""
    text, first = path.read_text() if path.is_file() else "", start(place)
    if first not in text or END not in text.partition(first)[2]:
        raise SystemExit(f"bench.py: {path} has no place for the table, between the lines {first} and {END}")


def write(path: Path, found: dict[str, Any], words: Sequence[str], place: str = "") -> None:
    """Write the tables of this processor between the two markers, in place of its former ones; those of other
    processors stay."""
    first = start(place)
    before, _, rest = path.read_text().partition(first)
    old, _, after = rest.partition(END)
    title = f"{HEADING}{describe_processor(found['machine'])}\n"
    sections = {section.partition("\n")[0]: section for section in old.split(f"\n{HEADING}")[1:]}
    sections[title.removeprefix(HEADING).rstrip()] = title.removeprefix(HEADING) + table(found, words)
    body = "".join(f"\n{HEADING}{section.rstrip()}\n" for _, section in sorted(sections.items()))
    path.write_text(f"{before}{first}\n{body}\n{END}{after}")


def describe_processor(machine: dict[str, str]) -> str:
    """Return the processor, its cores, and the accelerators, by which measurements are told apart."""
    device = f", {machine['device']}" if "device" in machine else ""
    return f"{machine['processor']}, {machine['cores']} cores{device}"


def table(found: dict[str, Any], words: Sequence[str]) -> str:
    """Format the machine, the command and a table per part as Markdown."""
    machine, versions = found["machine"], found["versions"]
    names = ", ".join(f"{name} {version}" for name, version in {"jax": machine["jax"], **versions}.items())
    lines = [
        "",
        f"Measured on {found['date']}; Python {machine['python']}, {names}; commit {machine['commit']}.",
        "",
    ]
    tunables = [f"GLIBC_TUNABLES={machine['GLIBC_TUNABLES']}"] if "GLIBC_TUNABLES" in machine else []
    lines += ["```bash", shlex.join([*tunables, "python", "scripts/bench.py", *words]), "```", ""]
    for part in dict.fromkeys(row["part"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["part"] == part]
        rates = found.get("ceilings", {}).get(part)
        lines += [f"**{part.capitalize()}.** {ceiling(rates)}" if rates else f"**{part.capitalize()}.**", ""]
        has_ratio = any("ratio" in row for row in rows)
        columns = (*COLUMNS[find_columns(rows[0])], *((RATIO,) if has_ratio else ()))
        lines += [
            f"| | {' | '.join(('median', 'quartiles', 'shortest', *columns))} |",
            "|---" + "|--:" * (3 + len(columns)) + "|",
        ]
        lines += [
            cells(row) + (f" {row['ratio']:.2f} |" if "ratio" in row else " – |" if has_ratio else "") for row in rows
        ]
        lines += [""]
    return "\n".join(lines) + "\n"


def ceiling(rates: dict[str, float]) -> str:
    products = " and ".join(
        f"{rates[f'matmul {dtype}'] / 1e9:,.0f} GFLOP/s in {dtype}" for dtype in ("float32", "bfloat16")
    )
    return (
        f"In the same rounds a single matrix product ran at {products}, and a copy at {rates['copy'] / 1e9:,.0f} GB/s."
    )


def find_columns(row: dict[str, Any]) -> str:
    """Return the key of `COLUMNS` for a row."""
    return next(name for name in COLUMNS if name in row)


def cells(row: dict[str, Any]) -> str:
    kind, rate = find_columns(row), f"{row.get('tokens_per_second', 0):,.0f}"
    last = f"{rate} | {row.get('utilization', row.get('share', 0)):.0%}"
    if kind == "compiling":
        last = f"{row['compiling']:#.3g} s | {row['born']:#.3g} s"
    elif kind == "median":
        last = ""
    elif kind == "copy_share":
        product = f"{row['flops'] / 1e9:.2f} | {row['share']:.0%}" if "flops" in row else "– | –"
        last = f"{rate} | {product} | {row['bytes_passed'] / 1e6:.1f} | {row['copy_share']:.0%}"
    elif kind == "bytes_learning":
        megabytes = lambda name: f"{row[name] / 1e6:.1f}" if row.get(name) else "–"
        last = f"{rate} | {megabytes('bytes_parameters')} | {megabytes('bytes_learning')} | {megabytes('temporaries')}"
    elif kind == "bytes_remembered":
        last = f"{rate} | {row['bytes_remembered'] / 1e6:.2f}"
    elif kind == "bytes_read":
        last = f"{rate} | {row['bytes_per_second'] / 1e6:.2f}"
    elif kind == "tokens_per_second":
        last = rate
    times = f"{row['median']:#.3g} s | {row['low']:#.3g} to {row['high']:#.3g} | {row['shortest']:#.3g} s"
    return f"| {row['name']} | {times} |" + (f" {last} |" if last else "")
