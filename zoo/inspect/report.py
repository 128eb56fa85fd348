"""A compiled step in a dozen lines."""

from collections.abc import Iterator
from typing import Any

_MAX_SHOWN = 12


def format_program(program: Any) -> str:
    """What `print(program)` shows."""
    return "\n".join(f"{label:<14}{text}".rstrip() for label, text in _format_lines(program))


def _format_lines(program: Any) -> Iterator[tuple[str, str]]:
    axes = " x ".join(f"{axis} {size}" for axis, size in program.mesh.items())
    on = f"{program.devices} devices" if program.devices > 1 else "one device"
    yield program.name, f"{axes}: {on}" if axes else on
    seconds = program.seconds
    where = ", out of the compilation cache" if seconds.cached else ""
    yield "seconds", f"trace {seconds.trace:.2f}, lower {seconds.lower:.2f}, compile {seconds.compile:.2f}{where}"
    least = "at least " if program.flops.uncounted else ""
    each = (
        f", {_format_decimal_prefix(program.flops.total / program.devices)}FLOP a device" if program.devices > 1 else ""
    )
    yield "compute", f"{least}{_format_decimal_prefix(program.flops.total)}FLOP in matrix products{each}"
    yield from (("", f"not counted: {what}") for what in program.flops.uncounted)
    yield "traffic", f"at most {_format_decimal_prefix(program.bytes_moved)}B a device, to and from memory"
    yield from (("", f"counted once, its length is not known: {loop}") for loop in program.endless)
    yield "memory", _format_memory(program.memory)
    yield "donated", _format_donations(program.donations)
    yield from (("", f"not taken over: {one.name}") for one in program.failed_donations[:_MAX_SHOWN])
    if not program.collectives:
        yield "collectives", "none"
        return
    widths = [
        max(len(one.kind) for one in program.collectives),
        max(len(_format_axes(one)) for one in program.collectives),
    ]
    yield "collectives", f"{'':{widths[0]}}  {'along':{widths[1]}}  {'times':>6}  {'bytes a device':>14}"
    for one in program.collectives:
        yield (
            "",
            f"{one.kind:{widths[0]}}  {_format_axes(one):{widths[1]}}  {one.count:>6,}  {_format_decimal_prefix(one.bytes) + 'B':>14}",
        )


def _format_memory(stats: Any) -> str:
    if stats is None:
        return "the backend does not tell"
    parts = [f"{_format_decimal_prefix(value)}B {name}" for name, value in (
        ("arguments", stats.arguments),
        ("new outputs", stats.outputs - stats.aliased),
        ("temporaries", stats.temporaries),
        ("code", stats.code),
    ) if value]  # fmt: skip
    return f"{_format_decimal_prefix(stats.total)}B a device: {', '.join(parts)}"


def _format_donations(donations: Any) -> str:
    if not donations:
        return "nothing"
    taken = [one for one in donations if one.aliased]
    return f"{len(taken)} of {len(donations)} arrays taken over, {_format_decimal_prefix(sum(one.bytes for one in taken))}B a device"


def _format_axes(collective: Any) -> str:
    return collective.groups if collective.axes is None else ", ".join(collective.axes) or "no axis"


def _format_decimal_prefix(value: float | int) -> str:
    """Three digits and a decimal prefix, with the unit to follow: `12.3 M`."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}"
