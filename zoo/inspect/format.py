"""Format the report of a compiled step as a dozen lines of text, and its lists as tables."""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

LINE = 88
"""Characters of a line of text: a terminal beside an editor, or a code box of the documentation."""
_MAX_SHOWN = 12
_UNITS = {"bytes": "B", "flops": "FLOP"}
Row = TypeVar("Row")


class Rows(tuple[Row, ...]):
    """A tuple of dataclasses, largest first, which prints as a table of the first twelve."""

    __slots__ = ()

    def __str__(self) -> str:
        return format_rows(self)


def format_rows(rows: Any) -> str:
    """Format dataclasses as a table: a column for each field. The first field is a number, and is summed up for the
    rows that are not shown."""
    if not rows:
        return "none"
    names = [field.name for field in dataclasses.fields(rows[0])]
    table = [names]
    table += [[_format_cell(name, getattr(row, name)) for name in names] for row in rows[:_MAX_SHOWN]]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for cells in table:
        first = f"{cells[0]:>{widths[0]}}"
        others = [cell.ljust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        lines.append("  ".join([first, *others]).rstrip())
    if rest := rows[_MAX_SHOWN:]:
        total = sum(getattr(row, names[0]) for row in rest)
        lines.append(f"{_format_cell(names[0], total):>{widths[0]}}  in {len(rest)} more")
    return "\n".join(lines)


def _format_cell(name: str, value: Any) -> str:
    if name in _UNITS:
        return format_decimal_prefix(value) + _UNITS[name]
    match value:
        case None:
            return "unknown"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.3g}"
        case tuple():
            return ", ".join(value) or "no axis"
    return value


def format_program(program: Any) -> str:
    """Format a `CompiledProgram` for `print`."""
    return "\n".join(f"{label:<14}{text}".rstrip() for label, text in _format_lines(program))


def wrap_phrases(label: str, text: str, indent: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of phrases between commas that are too long for one line, with the label before the first."""
    line, *phrases = text.split(", ")
    for phrase in phrases:
        if indent + len(f"{line}, {phrase},") > LINE:
            yield label, f"{line},"
            label = ""
            line = phrase
        else:
            line += f", {phrase}"
    yield label, line


def _format_lines(program: Any) -> Iterator[tuple[str, str]]:
    axes = " x ".join(f"{axis} {size}" for axis, size in program.mesh.items())
    on = f"{program.devices} devices" if program.devices > 1 else "one device"
    if axes:
        on = f"{axes}: {on}"
    yield program.name, on
    seconds = program.seconds
    where = ", out of the compilation cache" if seconds.cached else ""
    yield "seconds", f"trace {seconds.trace:.2f}, lower {seconds.lower:.2f}, compile {seconds.compile:.2f}{where}"
    bound = "at least " if program.flops.uncounted else ""
    each = f", {format_decimal_prefix(program.flops.total / program.devices)}FLOP per device"
    if program.devices <= 1:
        each = ""
    yield "compute", f"{bound}{format_decimal_prefix(program.flops.total)}FLOP in matrix products{each}"
    if program.compiled_flops is not None and round(program.flops.total / program.devices) != program.compiled_flops:
        yield "", f"{format_decimal_prefix(program.compiled_flops)}FLOP per device in the compiled program"
    if program.recomputed:
        again = sum(row.flops for row in program.recomputed)
        yield "", f"{format_decimal_prefix(again)}FLOP per device recomputed in the backward pass"
    yield from (("", f"not counted: {operation}") for operation in program.flops.uncounted)
    yield "traffic", f"at most {format_decimal_prefix(program.bytes_moved)}B per device, to and from memory"
    if program.endless:
        more = ", ..." if len(program.endless) > _MAX_SHOWN else ""
        names = ", ".join(program.endless[:_MAX_SHOWN])
        yield "", f"counted once, unknown trip count: {len(program.endless)} loops, {names}{more}"
    yield from wrap_phrases("memory", _format_memory(program.memory, program.platform), 14)
    yield "donated", _format_donations(program.donations)
    yield from (("", f"not reused: {donation.name}") for donation in program.failed_donations[:_MAX_SHOWN])
    if not program.collectives:
        yield "collectives", "none"
        return
    yield from _format_collectives(program)


def _format_collectives(program: Any) -> Iterator[tuple[str, str]]:
    """Format the collectives as a table, and below it the sum of their exposed seconds."""
    columns = [("times", "count", 6), ("bytes per device", "bytes", 16)]
    if any(row.asynchronous for row in program.collectives):
        columns.append(("asynchronous", "asynchronous", 12))
    if program.exposed_seconds is not None:
        columns += [(name, f"{name[:-2]}_seconds", 9) for name in ("link s", "product s", "exposed s")]
    kinds = max(len(row.kind) for row in program.collectives)
    along = max(len(_format_axes(row)) for row in program.collectives)
    header = "".join(f"  {name:>{width}}" for name, _, width in columns)
    yield "collectives", f"{'':{kinds}}  {'along':{along}}{header}"
    for row in program.collectives:
        cells = "".join(f"  {_format_cell(name, getattr(row, name)):>{width}}" for _, name, width in columns)
        yield "", f"{row.kind:{kinds}}  {_format_axes(row):{along}}{cells}"
    if program.exposed_seconds is not None:
        total = sum(row.link_seconds for row in program.collectives)
        yield (
            "exposed",
            f"{program.exposed_seconds:.3g} of {total:.3g} s on the links (nominal rates of {program.chip})",
        )


def _format_memory(stats: Any, platform: str) -> str:
    if stats is None:
        return "not reported by the backend"
    parts = [f"{format_decimal_prefix(value)}B {name}" for name, value in (
        ("arguments", stats.arguments),
        ("new outputs", stats.outputs - stats.aliased),
        ("temporaries", stats.temporaries),
        ("code", stats.code),
    ) if value]  # fmt: skip
    if platform != "cpu" and stats.peak is not None:
        return f"{format_decimal_prefix(stats.peak)}B at the peak, per device: {', '.join(parts)}"
    return f"{format_decimal_prefix(stats.total)}B per device: {', '.join(parts)}"


def _format_donations(donations: Any) -> str:
    if not donations:
        return "nothing"
    reused = [donation for donation in donations if donation.aliased]
    size = format_decimal_prefix(sum(donation.bytes for donation in reused))
    return f"{len(reused)} of {len(donations)} arrays reused, {size}B per device"


def _format_axes(collective: Any) -> str:
    if collective.axes is None:
        return collective.groups
    return ", ".join(collective.axes) or "no axis"


def format_decimal_prefix(value: float | int) -> str:
    """Format three digits and a decimal prefix, for a unit to follow: `12.3 M`."""
    for prefix in ("", "k", "M", "G", "T", "P", "E", "Z"):
        if abs(value) < 999.5 or prefix == "Z":
            break
        value /= 1000
    return f"{value:.3g} {prefix}"
