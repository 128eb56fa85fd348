"""Format a plan as a screen of text."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from zoo.inspect.report import format_decimal_prefix
from zoo.parallel.mesh import format_sizes

from .step import MARGIN

if TYPE_CHECKING:
    from .step import Plan

_BAR = 30
_LEAST_SECONDS = 1e-6
"""Collectives that take less are added up in one line."""


def format_plan(plan: "Plan", *, tokens: float | None = None) -> str:
    """Format a `Plan` for `print`, and, if `tokens` is given, the days that training on so many tokens takes."""
    return "\n".join(f"{label:<12}{text}".rstrip() for label, text in _iter_lines(plan, tokens))


def _iter_lines(plan: "Plan", tokens: float | None) -> Iterator[tuple[str, str]]:
    where = f"{format_sizes(plan.program.shape)} on {plan.topology}: {plan.topology.devices:,} devices"
    yield plan.program.name, ", ".join([where, *_list_options(plan)])
    yield from _iter_memory(plan)
    flops = plan.program.work.total_flops * plan.topology.devices
    parts = [f"{_format(flops)}FLOP"]
    if plan.model_flops:
        parts.append(f"{_format(plan.model_flops)}FLOP without recomputation and bubbles")
    yield "compute", ", ".join(parts)
    yield from _iter_collectives(plan)
    seconds = ", ".join(f"{name} {value:.3g}" for name, value in plan.seconds.items() if value)
    yield "seconds", f"{seconds}; bound by {plan.bound}"
    yield "step", f"{plan.overlapped:.3g} s if all overlap{_format_mfu(plan, plan.overlapped)}"
    yield "", f"{plan.sequential:.3g} s if no collective does{_format_mfu(plan, plan.sequential)}"
    if plan.overlap is not None:
        took = f"gathers and scatters {plan.overlap.transfers:.3g} s, products {plan.overlap.products:.3g} s"
        yield "loop", f'{took}: loop="ahead" may hide more; --compile compares'
    if plan.tokens_per_second is not None:
        yield "tokens", _format_tokens(plan, tokens)


def _list_options(plan: "Plan") -> list[str]:
    options = plan.options
    if options is None:
        return []
    parts = [f"{options.rows:,} rows of {options.seq:,} tokens"]
    if options.microbatches > 1:
        parts.append(f"{options.microbatches} micro-batches")
    parts.append(f"remat {options.remat}")
    if options.loop != "auto":
        parts.append(f"loop {options.loop}")
    return [*parts, options.dtype]


def _iter_memory(plan: "Plan") -> Iterator[tuple[str, str]]:
    verdict = "DOES NOT FIT"
    if plan.peak <= plan.chip.memory:
        if plan.peak <= (1 - MARGIN) * plan.chip.memory:
            verdict = "fits"
        else:
            verdict = f"fits, with less than {MARGIN:.0%} to spare"
    share = plan.peak / plan.chip.memory
    yield "memory", f"about {_format(plan.peak)}B at the peak, {share:.0%} of {_format(plan.chip.memory)}B: {verdict}"
    compiler = "zoo.inspect.compiled" if plan.options is None else "--compile"
    yield "", f"(within {MARGIN:.0%} in 48 of 50 compiled steps; {compiler} asks the compiler)"
    yield from _iter_kinds(plan, plan.memory)
    if plan.options is not None and plan.options.rollouts is not None:
        total = sum(plan.sampling_memory.values())
        rollouts = plan.options.rollouts
        verdict = "fits" if total <= plan.chip.memory else "DOES NOT FIT"
        share = f"{total / plan.chip.memory:.0%} of {_format(plan.chip.memory)}B: {verdict}"
        yield "sampling", f"{rollouts.rows:,} rows of {rollouts.length:,} tokens, {_format(total)}B, {share}"
        yield from _iter_kinds(plan, plan.sampling_memory)


def _iter_kinds(plan: "Plan", memory: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield a line with a bar for each kind of memory."""
    for kind, size in memory.items():
        bar = "#" * min(round(_BAR * size / plan.chip.memory), 2 * _BAR)
        yield "", f"{kind:<16} {_format(size) + 'B':>8}  {bar}"


def _iter_collectives(plan: "Plan") -> Iterator[tuple[str, str]]:
    if plan.transfers:
        yield "collectives", f"{'':<18}  {'along':<16}  {'times':>7}  {'sent':>8}  {'seconds':>8}"
    for transfer in (x for x in plan.transfers if x.seconds >= _LEAST_SECONDS):
        row = transfer.collective
        place = "network" if transfer.crosses else ""
        line = _format_collective(row.kind, ", ".join(row.axes or ()), row.count, transfer.sent, transfer.seconds)
        yield "", f"{line}  {place}"
    small = [x for x in plan.transfers if x.seconds < _LEAST_SECONDS]
    if small:
        count = sum(x.collective.count for x in small)
        sent = sum(x.sent for x in small)
        yield "", _format_collective("below 1 us", "", count, sent, sum(x.seconds for x in small))


def _format_collective(kind: str, along: str, count: int, sent: float, seconds: float) -> str:
    return f"{kind:<18}  {along:<16}  {count:>7,}  {_format(sent) + 'B':>8}  {seconds:>8.3g}"


def _format_tokens(plan: "Plan", tokens: float | None) -> str:
    """Format the range of tokens per second, and of the days for so many tokens."""
    rates = plan.tokens_per_second or {}
    text = f"{_join_range([_format_count(rate) for rate in rates.values()])} tokens/s"
    if tokens is None or (days := plan.count_days(tokens)) is None:
        return text
    unit = "days"
    durations = list(days.values())
    if days["overlapped"] < 1:
        unit = "hours"
        durations = [24 * value for value in durations]
    ends = [f"{value:,.3g}" if value < 100 else f"{value:,.0f}" for value in durations]
    return f"{text}; {_format_count(tokens)} tokens: {_join_range(ends)} {unit}"


def _join_range(ends: list[str]) -> str:
    """Join both ends of a range, or name the end once if they are equal."""
    return " to ".join(dict.fromkeys(ends))


def _format_count(value: float) -> str:
    """Format as text about models does: 144k, 1.2M, 15B, 1T."""
    return format_decimal_prefix(value).replace(" ", "").replace("G", "B")


def _format_mfu(plan: "Plan", seconds: float) -> str:
    mfu = plan.mfu(seconds)
    if mfu is None:
        return ""
    return f", MFU {mfu:.0%}"


def _format(value: float | int) -> str:
    return format_decimal_prefix(value)
