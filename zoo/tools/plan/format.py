"""Format a plan as a screen of text."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zoo.inspect.report import format_decimal_prefix
from zoo.parallel.mesh import format_sizes

if TYPE_CHECKING:
    from .step import Plan

_BAR = 30


def format_plan(plan: "Plan") -> str:
    """Format a `Plan` for `print`."""
    return "\n".join(f"{label:<12}{text}".rstrip() for label, text in _iter_lines(plan))


def _iter_lines(plan: "Plan") -> Iterator[tuple[str, str]]:
    yield plan.program.name, f"{format_sizes(plan.program.shape)} on {plan.topology}: {plan.topology.devices:,} devices"
    share = plan.peak / plan.chip.memory
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    yield "memory", f"{_format(plan.peak)}B at the peak, {share:.0%} of {_format(plan.chip.memory)}B: {verdict}"
    for kind, size in plan.memory.items():
        bar = "#" * min(round(_BAR * size / plan.chip.memory), 2 * _BAR)
        yield "", f"{kind:<16} {_format(size) + 'B':>8}  {bar}"
    flops = plan.program.work.total_flops * plan.topology.devices
    parts = [f"{_format(flops)}FLOP"]
    if plan.model_flops:
        parts.append(f"{_format(plan.model_flops)}FLOP without recomputation and bubbles")
    yield "compute", ", ".join(parts)
    if plan.transfers:
        yield "collectives", f"{'':<18}  {'along':<16}  {'times':>7}  {'sent':>8}  {'seconds':>8}"
    for transfer in plan.transfers:
        row, place = transfer.collective, "network" if transfer.crosses else ""
        along = ", ".join(row.axes or ())
        sent = f"{_format(transfer.sent)}B"
        yield "", f"{row.kind:<18}  {along:<16}  {row.count:>7,}  {sent:>8}  {transfer.seconds:>8.3g}  {place}"
    seconds = ", ".join(f"{name} {value:.3g}" for name, value in plan.seconds.items() if value)
    yield "seconds", f"{seconds}; bound by {plan.bound}"
    yield "step", f"{plan.overlapped:.3g} s if all overlap{_format_mfu(plan, plan.overlapped)}"
    yield "", f"{plan.sequential:.3g} s if no collective does{_format_mfu(plan, plan.sequential)}"


def _format_mfu(plan: "Plan", seconds: float) -> str:
    mfu = plan.mfu(seconds)
    return "" if mfu is None else f", MFU {mfu:.0%}"


def _format(value: float | int) -> str:
    return format_decimal_prefix(value)
