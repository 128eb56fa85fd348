"""Format a plan as a screen of text."""

from collections.abc import Iterator, Mapping

from zoo.inspect.format import format_decimal_prefix, wrap_phrases
from zoo.parallel.mesh import format_sizes

from .options import TrainingOptions
from .step import MARGIN, Plan

_BAR = 30
_LEAST_SECONDS = 1e-6
"""Collectives that take less are added up in one line."""


def format_plan(plan: Plan, *, tokens: float | None = None) -> str:
    """Format a `Plan` for `print`, and, if `tokens` is given, the days that training on so many tokens takes."""
    return "\n".join(f"{label:<12}{text}".rstrip() for label, text in _iter_lines(plan, tokens))


def _iter_lines(plan: Plan, tokens: float | None) -> Iterator[tuple[str, str]]:
    where = f"{format_sizes(plan.program.shape)} on {plan.topology}"
    if plan.topology.devices > 1:
        where += f": {plan.topology.devices:,} devices"
    yield from wrap_phrases(plan.program.name, ", ".join([where, *_list_options(plan)]), 12)
    yield from _iter_memory(plan)
    flops = plan.program.work.total_flops * plan.topology.devices
    parts = [f"{_format(flops)}FLOP"]
    if plan.model_flops:
        parts.append(f"{_format(plan.model_flops)}FLOP without recomputation and bubbles")
    yield "compute", ", ".join(parts)
    yield from _iter_collectives(plan)
    seconds = ", ".join(f"{name} {value:.3g}" for name, value in plan.seconds.items() if value)
    yield "seconds", f"{seconds}; bound by {plan.bound}"
    yield "", _describe_products(plan)
    yield "step", f"at least {plan.lower_bound:.3g} s{_format_mfu(plan, plan.lower_bound, 'at most ')}"
    condition = "if products, memory and collectives take turns"
    yield "", f"{plan.sequential:.3g} s {condition}{_format_mfu(plan, plan.sequential)}"
    if plan.overlap is not None:
        took = f"gathers and scatters {plan.overlap.transfers:.3g} s, products {plan.overlap.products:.3g} s"
        yield "loop", f'{took}: loop="ahead" may hide more; --compile compares'
    if (rates := plan.tokens_per_second) is not None:
        most = _format_count(rates["lower_bound"])
        in_turns = _format_count(rates["sequential"])
        yield "tokens", f"at most {most}/s; {in_turns}/s in turns"
    if tokens is not None and (days := plan.count_days(tokens)) is not None:
        yield "training", _format_days(days, tokens)


def _list_options(plan: Plan) -> list[str]:
    return [] if plan.options is None else plan.options.describe()


def _describe_products(plan: Plan) -> str:
    """Say what products take at measured rates, which the second time of a step counts."""
    chip = plan.chip
    rates = {dtype: chip.measured_rate(dtype) for dtype in plan.program.work.flops}
    measured = [f"{_format(rate)}FLOP/s in {dtype}" for dtype, rate in rates.items() if rate != chip.rate(dtype)]
    if not measured:
        return f"no product was measured on {chip.name}: both times are at data-sheet rates"
    return f"products {plan.measured_product_seconds:.3g} at the measured {' and '.join(measured)}"


def _iter_memory(plan: Plan) -> Iterator[tuple[str, str]]:
    verdict = "DOES NOT FIT"
    if plan.peak <= plan.chip.memory:
        if plan.peak <= (1 - MARGIN) * plan.chip.memory:
            verdict = "fits"
        else:
            verdict = f"fits, with less than {MARGIN:.0%} to spare"
    share = plan.peak / plan.chip.memory
    yield "memory", f"about {_format(plan.peak)}B at the peak, {share:.0%} of {_format(plan.chip.memory)}B: {verdict}"
    if isinstance(plan.options, TrainingOptions | None):
        compiler = "zoo.inspect.compiled" if plan.options is None else "--compile"
        error = f"within {MARGIN:.0%} in 48 of 50 compiled steps"
        if plan.options is not None and plan.options.lora is not None:
            error = "0.61 to 1.07 of six compiled peaks"
        yield "", f"({error}; {compiler} asks the compiler)"
    yield from _iter_kinds(plan, plan.memory)
    if (rollouts := getattr(plan.options, "rollouts", None)) is not None:
        total = sum(plan.sampling_memory.values())
        verdict = "fits" if total <= plan.chip.memory else "DOES NOT FIT"
        share = f"{total / plan.chip.memory:.0%} of {_format(plan.chip.memory)}B: {verdict}"
        yield "sampling", f"{rollouts.rows:,} rows of {rollouts.length:,} tokens, {_format(total)}B, {share}"
        yield from _iter_kinds(plan, plan.sampling_memory)


def _iter_kinds(plan: Plan, memory: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield a line with a bar for each kind of memory."""
    for kind, size in memory.items():
        bar = "#" * min(round(_BAR * size / plan.chip.memory), 2 * _BAR)
        yield "", f"{kind:<16} {_format(size) + 'B':>8}  {bar}"


def _iter_collectives(plan: Plan) -> Iterator[tuple[str, str]]:
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


def _format_days(days: Mapping[str, float], tokens: float) -> str:
    """Format the days, or hours, of training on so many tokens."""
    unit = "days"
    least = days["lower_bound"]
    in_turns = days["sequential"]
    if least < 1:
        unit = "hours"
        least *= 24
        in_turns *= 24
    ends = f"at least {_format_duration(least)} {unit}; {_format_duration(in_turns)} in turns"
    return f"{_format_count(tokens)} tokens take {ends}"


def _format_duration(value: float) -> str:
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def _format_count(value: float) -> str:
    """Format as text about models does: 144k, 1.2M, 15B, 1T."""
    return format_decimal_prefix(value).replace(" ", "").replace("G", "B")


def _format_mfu(plan: Plan, seconds: float, words: str = "") -> str:
    mfu = plan.mfu(seconds)
    if mfu is None:
        return ""
    return f" (MFU {words}{mfu:.0%})"


def _format(value: float | int) -> str:
    return format_decimal_prefix(value)


setattr(Plan, "__str__", format_plan)  # noqa: B010 - here, since what formats a plan needs the class
