"""Write the tables of docs/plan.md and docs/choose_mesh.md from the planner: chips, measured steps, models, meshes.

    python scripts/plan_tables.py                  # every table: ten minutes of one core
    python scripts/plan_tables.py --only chips     # one of them

A test holds the tables that take no trace, and a row of those that do, against the planner.
"""

import dataclasses
import datetime
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tyro

import zoo
from scripts.plan_table_cases import (
    BATCHES,
    COMPARISONS,
    DECODING,
    LONG,
    MEASURED,
    QLORA,
    QLORA_RANK,
    REFUSED,
    SCREEN,
    SCREEN_TOKENS,
    SIZES,
    Case,
    Measured,
)
from zoo import Layout
from zoo.parallel import SEQUENCE, ZERO1, ZERO2, ZERO3
from zoo.parallel.chips import TERA
from zoo.parallel.devices import use_cpu
from zoo.parallel.topology import CARDS, parse_topology
from zoo.tools import plan as planning
from zoo.tools.plan import CHIPS, Chip, Plan, TrainingOptions
from zoo.tools.plan.format import format_plan
from zoo.tools.plan.step import BudgetError

DOCS = Path(__file__).parents[1] / "docs"
COMMAND = "python scripts/plan_tables.py"
END = "<!-- until here -->"


def make_options(case: Case) -> TrainingOptions:
    return TrainingOptions(case.rows, case.seq, remat=case.remat, microbatches=case.microbatches)


def make_layout(case: Case) -> Layout:
    layout = (ZERO1, ZERO2, ZERO3)[case.zero_stage - 1]
    return layout.with_dims(tokens=SEQUENCE.axes("tokens")) if case.sequence else layout


def make_model(preset: str, *, key: Any) -> Any:
    if preset == "1.09b":
        return zoo.models.Transformer(vocab=32768, embed=2048, layers=20, heads=16, mlp=5632, key=key)
    return zoo.models.preset(preset, key=key)


@cache
def count_model_flops(preset: str, seq: int) -> int:
    """Return the FLOPs of one row."""
    return planning.count_model_flops(partial(make_model, preset), TrainingOptions(1, seq)) or 0


_plans: dict[str, Plan] = {}


def plan_case(case: Case) -> Plan:
    """Plan a case; one that several tables have, once."""
    if (name := str(case)) not in _plans:
        _plans[name] = _plan_case(case)
    return _plans[name]


def _plan_case(case: Case) -> Plan:
    make = partial(make_model, case.preset)
    topology = parse_topology(case.topology)
    flops = case.rows * count_model_flops(case.preset, case.seq)
    return planning.plan_training(make, case.mesh, topology, make_options(case), make_layout(case), model_flops=flops)


def format_mesh(case: Case) -> str:
    """Return sizes of axes, and what else the layout is."""
    axes = " x ".join(f"{axis} {size}" for axis, size in case.mesh.items() if size > 1)
    return axes + f", ZeRO-{case.zero_stage}" * (case.zero_stage != 3) + ", sequence parallel" * case.sequence


def format_step(plan: Plan) -> list[str]:
    """Return the cells of a plan: peak memory, least seconds by resource, both times of a step, and the MFU of both."""
    seconds = [format_seconds(plan.seconds[name]) for name in ("products", "links", "network")]
    times = (plan.lower_bound, plan.sequential)
    most, in_turns = (plan.mfu(time) or 0.0 for time in times)
    return [format_peak(plan), *seconds, *map(format_seconds, times), f"{100 * in_turns:.0f} to {most:.0%}"]


STEP = ["peak", "products, s", "links, s", "network, s", "at least, s", "in turns, s", "MFU"]
"""Headers of `format_step`."""


def format_peak(plan: Plan) -> str:
    """Format a peak: bold if it does not fit, italic if it fits without the margin of the estimate."""
    if not plan.fits:
        return f"**{plan.peak / 1e9:,.0f} GB**"
    return f"{plan.peak / 1e9:,.1f} GB" if plan.fits_with_margin else f"*{plan.peak / 1e9:,.1f} GB*"


def format_seconds(seconds: float) -> str:
    return "" if seconds < 5e-4 else f"{seconds:.3g}" if seconds < 100 else f"{seconds:.0f}"


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    rule = ["--:" if number in right else "---" for number in range(len(header))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))


def build_screen() -> str:
    return f"```text\n{format_plan(plan_case(SCREEN), tokens=SCREEN_TOKENS)}\n```"


def build_qlora() -> str:
    options = dataclasses.replace(make_options(QLORA), lora=QLORA_RANK, quantization="nf4")
    plan = planning.plan_training(partial(make_model, QLORA.preset), {}, parse_topology(QLORA.topology), options)
    return f"```text\n{plan}\n```"


def build_decode() -> str:
    options = planning.DecodingOptions(DECODING.rows, DECODING.seq, quantization="nf4")
    plan = planning.plan_decoding(partial(make_model, DECODING.preset), {}, parse_topology(DECODING.topology), options)
    return f"```text\n{plan}\n```"


def build_refused() -> str:
    try:
        plan_case(REFUSED).require_fit()
    except BudgetError as error:
        lines = [line for row in f"zoo plan: {error}".splitlines() for line in textwrap.wrap(row, 88)]
        return "\n".join(["```text", *lines, "```"])
    raise AssertionError(f"{REFUSED} fits: choose a larger model")


def build_chips() -> str:
    def row(chip: Chip) -> list[str]:
        fp8 = f"{chip.flops['float8'] / TERA:,.0f}" if chip.flops["float8"] > chip.flops["bfloat16"] else "-"
        rates = [f"{chip.flops[dtype] / TERA:,.4g}" for dtype in ("bfloat16", "float32", "float32 highest")]
        measured = f"{chip.measured['bfloat16'] / TERA:,.4g}" if chip.measured else "-"
        links = [f"{rate / 1e9:,.4g}" for rate in (chip.bandwidth, chip.link, chip.network)]
        if chip.name in CARDS:
            links[-1] = "-"
        return [f"`{chip.name}`", f"{chip.memory / 1e9:.0f}", *rates, fp8, measured, *links]

    def source(chip: Chip) -> list[str]:
        link = f"[{chip.source}](https://{chip.source})" if chip.source.startswith("docs.") else chip.source
        return [f"`{chip.name}`", link, chip.measured_source or "-"]

    header = ["chip", "HBM, GB", "BF16, TFLOP/s", "float32", "float32 highest", "FP8", "BF16, measured"]
    header += ["HBM, GB/s", "link, GB/s", "network, GB/s"]
    rates = format_table(header, map(row, CHIPS.values()), right=range(1, 10))
    sources = format_table(["chip", "source", "source of the measured rate"], map(source, CHIPS.values()))
    return f"{rates}\n\n{sources}"


def build_balance() -> str:
    """Tokens per device at which collectives of parameters take as long as the products: FLOP/s over bytes/s."""

    def row(chip: Chip) -> list[str]:
        rate = chip.rate("bfloat16")
        across = rate / chip.network / 8 if chip.platform == "gpu" else None
        cells = [f"{rate / chip.link:,.0f}", f"{rate / chip.network:,.0f}", "-" if across is None else f"{across:,.0f}"]
        return [f"`{chip.name}`", *cells]

    header = ["chip", "within the fast domain", "across it, one device per host", "across it, 8 devices per host"]
    chips = [chip for name, chip in CHIPS.items() if name not in CARDS]
    return format_table(header, map(row, chips), right=(1, 2, 3))


def build_sizes() -> str:
    header = ["model", "devices", "tokens", "micro-batches", "mesh", *STEP]
    return format_table(header, map(build_size_row, SIZES), right=(2, 3, *range(5, 12)))


def build_size_row(case: Case) -> list[str]:
    return [*describe(case), format_mesh(case), *format_step(plan_case(case))]


def describe(case: Case) -> list[str]:
    tokens = case.rows * case.seq
    return [NAMES[case.preset], f"`{case.topology}`", f"{tokens / 2**20:g}M", str(case.microbatches)]


NAMES = {
    "1.09b": "1.09B",
    "llama3.1-8b": "Llama 3.1 8B",
    "llama3.2-1b": "Llama 3.2 1B",
    "llama3-8b": "Llama 3 8B",
    "llama3-70b": "Llama 3 70B",
    "llama3.1-405b": "Llama 3.1 405B",
    "mixtral-8x22b": "Mixtral 8x22B",
    "deepseek-v3": "DeepSeek-V3",
}


def build_comparison(cases: Sequence[Case]) -> str:
    header = ["devices", "tokens", "micro-batches", "mesh", *STEP]
    return format_table(header, map(build_comparison_row, cases), right=(1, 2, *range(4, 11)))


def build_comparison_row(case: Case) -> list[str]:
    return [*describe(case)[1:], format_mesh(case), *format_step(plan_case(case))]


def build_long() -> str:
    def row(case: Case) -> list[str]:
        return [*describe(case)[1:], format_mesh(case), format_peak(plan_case(case))]

    return format_table(["devices", "tokens", "micro-batches", "mesh", "peak"], map(row, LONG), right=(1, 2, 4))


def build_batches() -> str:
    header = ["devices", "tokens", "tokens per device", "micro-batches", "mesh", *STEP]
    return format_table(header, map(build_batch_row, BATCHES), right=(1, 2, 3, *range(5, 12)))


def build_batch_row(case: Case) -> list[str]:
    devices = parse_topology(case.topology).devices
    _, name, tokens, microbatches = describe(case)
    counts = [tokens, f"{case.rows * case.seq // devices:,}", microbatches]
    return [name, *counts, format_mesh(case), *format_step(plan_case(case))]


def build_measured() -> str:
    header = ["step", "program", "measured", "at least", "in turns", "measured / in turns", "source"]
    return format_table(header, map(build_measured_row, MEASURED), right=(2, 3, 4, 5))


def build_measured_row(measured: Measured) -> list[str]:
    case = measured.case
    plan = plan_case(case)
    rows = f"{case.rows} rows of {case.seq:,}, remat {case.remat}"
    times = [f"{time:.3g} s" for time in (measured.seconds, plan.lower_bound, plan.sequential)]
    ratio = f"{measured.seconds / plan.sequential:.2f}"
    step = f"{NAMES[case.preset]}, {rows}, `{case.topology}` {format_mesh(case)}".strip()
    return [step, measured.program, *times, ratio, measured.source]


TABLES: Mapping[str, tuple[str, Callable[[], str]]] = {
    "screen": ("plan.md", build_screen),
    "qlora": ("plan.md", build_qlora),
    "decode": ("plan.md", build_decode),
    "refused": ("plan.md", build_refused),
    "measured": ("plan.md", build_measured),
    "chips": ("plan.md", build_chips),
    "sizes": ("plan.md", build_sizes),
    "balance": ("choose_mesh.md", build_balance),
    "long": ("choose_mesh.md", build_long),
    "batches": ("choose_mesh.md", build_batches),
    **{name: ("choose_mesh.md", partial(build_comparison, cases)) for name, cases in COMPARISONS.items()},
}
"""The page of each table, and the function that builds it."""
UNTRACED = ("chips", "balance")
"""Tables that follow from the data sheets alone."""


def find_start(name: str) -> str:
    return f"<!-- Written by `{COMMAND}`: {name} -->"


def replace_table(page: str, name: str, table: str) -> str:
    """Return a page with another table between its marks. **Raises** `ValueError` without the marks."""
    start = find_start(name)
    if start not in page:
        raise ValueError(f"the page has no line {start}")
    before, _, rest = page.partition(start)
    return f"{before}{start}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


def read_table(page: str, name: str) -> str:
    """Return what is between the marks of a table, without the line that dates it."""
    inner = page.partition(find_start(name))[2].partition(END)[0]
    return re.sub(r"\nPlanned on .*", "", inner).strip()


def date_table(table: str) -> str:
    """Append when, and with which versions, a table was made."""
    day = datetime.datetime.now(tz=datetime.UTC).date()
    return f"{table}\n\nPlanned on {day} with equizoo {zoo.__version__} and jax {version('jax')}."


def main(*, only: str = "") -> None:
    """Write the tables into their pages.

    Args:
        only: Part of the names of the tables to write.
    """
    use_cpu()
    for name, (page, build) in TABLES.items():
        if only not in name:
            continue
        table = build() if name in UNTRACED else date_table(build())
        path = DOCS / page
        path.write_text(replace_table(path.read_text(encoding="utf-8"), name, table), encoding="utf-8")
        print(f"{path.relative_to(DOCS.parent)}: {name}", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
