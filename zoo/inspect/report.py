"""A compiled step in a dozen lines."""

from collections.abc import Iterator
from typing import Any

SHOWN = 12


def report(program: Any) -> str:
    """What `print(program)` shows."""
    return "\n".join(f"{label:<14}{text}".rstrip() for label, text in lines(program))


def lines(program: Any) -> Iterator[tuple[str, str]]:
    axes = " x ".join(f"{axis} {size}" for axis, size in program.mesh.items())
    on = f"{program.devices} devices" if program.devices > 1 else "one device"
    yield program.name, f"{axes}: {on}" if axes else on
    seconds = program.seconds
    where = ", out of the compilation cache" if seconds.cached else ""
    yield "seconds", f"trace {seconds.trace:.2f}, lower {seconds.lower:.2f}, compile {seconds.compile:.2f}{where}"
    least = "at least " if program.flops.uncounted else ""
    each = f", {scaled(program.flops.total / program.devices)}FLOP a device" if program.devices > 1 else ""
    yield "compute", f"{least}{scaled(program.flops.total)}FLOP in matrix products{each}"
    yield from (("", f"not counted: {what}") for what in program.flops.uncounted)
    yield "traffic", f"at most {scaled(program.bytes_moved)}B a device, to and from memory"
    yield from (("", f"counted once, its length is not known: {loop}") for loop in program.endless)
    yield "memory", memory(program.memory)
    yield "donated", donated(program.donations)
    yield from (("", f"not taken over: {one.name}") for one in program.failed_donations[:SHOWN])
    if not program.collectives:
        yield "collectives", "none"
        return
    widths = [max(len(one.kind) for one in program.collectives), max(len(along(one)) for one in program.collectives)]
    yield "collectives", f"{'':{widths[0]}}  {'along':{widths[1]}}  {'times':>6}  {'bytes a device':>14}"
    for one in program.collectives:
        yield "", f"{one.kind:{widths[0]}}  {along(one):{widths[1]}}  {one.count:>6,}  {scaled(one.bytes) + 'B':>14}"


def memory(found: Any) -> str:
    if found is None:
        return "the backend does not tell"
    parts = [f"{scaled(value)}B {name}" for name, value in (
        ("arguments", found.arguments),
        ("new outputs", found.outputs - found.aliased),
        ("temporaries", found.temporaries),
        ("code", found.code),
    ) if value]  # fmt: skip
    return f"{scaled(found.total)}B a device: {', '.join(parts)}"


def donated(found: Any) -> str:
    if not found:
        return "nothing"
    taken = [one for one in found if one.aliased]
    return f"{len(taken)} of {len(found)} arrays taken over, {scaled(sum(one.bytes for one in taken))}B a device"


def along(one: Any) -> str:
    return one.groups if one.axes is None else ", ".join(one.axes) or "no axis"


def scaled(value: float | int) -> str:
    """Three digits and a decimal prefix, with the unit to follow: `12.3 M`."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}"
