"""Benchmark of the library: training steps, time to first step, decoding; against the machine's peak and PyTorch.

    python scripts/bench.py                              # training step, first step, decoding: about ten minutes
    python scripts/bench.py --vs torch                   # against torch and transformers, if installed
    python scripts/bench.py --parts step --rounds 30 --remat full elementwise
    python scripts/bench.py --parts large                # on an accelerator: a model of a billion parameters
    python scripts/bench.py --vs torch --page docs/performance.md    # write the table of the documentation
    python scripts/bench.py --vs torch --parts mixture grouped --page docs/moe.md    # mixtures of experts
    python scripts/bench.py --vs torch --parts adapters --page docs/adapters.md    # LoRA, DoRA, QLoRA, against PEFT
    python scripts/bench.py --parts recurrences --operations gla kda --lengths 2048 32768    # cost per token

All entrants run in turn in one process, together with a matrix product and a copy, whose rates are the ceilings.
Times are medians over the rounds, with quartiles. Shares of the ceilings compare the shortest rounds of both, which
other load on the machine disturbs least. Compilation is measured in new processes without a cache.
"""

import datetime
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import tyro

import zoo
from scripts.benchmarks import adapted, large, measure, ours, recurrences, table
from scripts.benchmarks.measure import Timing
from zoo.ops.moe import grouped_matmul

Part = Literal[
    "step", "first", "decode", "mixture", "grouped", "recurrences", "recurrent", "continued", "adapters", "large"
]
Row = dict[str, Any]

NEW_TOKENS = 128
"""Tokens generated after the prompt when decoding."""


def main(
    *,
    parts: tuple[Part, ...] = (),
    vs: Literal["none", "torch"] = "none",
    rounds: int = 15,
    remat: tuple[zoo.parallel.Remat, ...] = ("elementwise",),
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16"),
    depths: tuple[int, ...] = (12, 48),
    lengths: tuple[int, ...] = (2048, 8192),
    operations: tuple[str, ...] = tuple(recurrences.OPERATIONS),
    slow: bool = False,
    out: Path = Path("runs/bench.json"),
    page: Path | None = None,
    place: str = "",
) -> None:
    """Run the benchmarks, print a line per entrant, and write all figures as JSON.

    Args:
        parts: Benchmarks to run: `step`, a training step; `first`, time to the first step; `decode`; `mixture`, a step
            of a mixture of experts and of the dense model with as many active parameters; `grouped`, its grouped matrix
            product; `recurrences`, single recurrent operations; `recurrent`, steps of recurrent models; `continued`,
            decoding after short and long prompts; `adapters`, steps that train a LoRA, a DoRA or a QLoRA, all
            parameters, and PEFT's; `large`, a model of a billion parameters. By default the first three, and `large`
            on an accelerator.
        vs: The rival: torch with transformers, eager and compiled.
        rounds: Runs per entrant; a tenth of it, at least two, for new processes.
        remat: Rematerialization policies of our step; one entrant each.
        dtypes: Compute dtypes.
        depths: Numbers of layers for the time to the first step.
        lengths: Sequence lengths for the recurrences.
        operations: Recurrences to run.
        slow: Include rivals whose step takes a minute: transformers' Mamba, token by token.
        out: Path of the JSON.
        page: A page whose table, between two markers, to rewrite.
        place: Name of the table, if the page has several: the word after the colon in its first marker.
    """
    require(rivals(vs, parts))
    if page is not None:
        table.check(page, place)
    here = parts or ("step", "first", "decode", *(("large",) if jax.default_backend() != "cpu" else ()))
    found: dict[str, Any] = {"date": datetime.date.today().isoformat(), "machine": measure.machine(), "rows": []}
    found["versions"] = versions(rivals(vs, here))
    for name, value in {**found["machine"], **found["versions"]}.items():
        print(f"{name:>12}  {value}")
    if "step" in here:
        entrants, facts = steps(vs, remat, dtypes)
        compete("training step", entrants, facts, rounds, found)
    if "first" in here:
        first_steps(vs, depths, max(2, rounds // 10), found)
    if "decode" in here:
        entrants, facts = decoding(vs)
        compete("decoding", entrants, facts, rounds, found)
    if "mixture" in here:
        entrants, facts = mixtures(vs, remat, dtypes)
        compete("mixture of experts", entrants, facts, rounds, found)
    if "grouped" in here:
        entrants, facts = grouped_products()
        compete("grouped product", entrants, facts, 3 * rounds, found)
    if "recurrences" in here:
        entrants, facts = recurrences.single_operations(operations, lengths)
        compete("recurrences", entrants, facts, rounds, found)
    if "recurrent" in here:
        entrants, facts = recurrences.steps(vs, remat, slow=slow)
        compete("recurrent models", entrants, facts, rounds, found)
    if "continued" in here:
        entrants, facts = recurrences.decoding_steps()
        compete("tokens after a prompt", entrants, facts, rounds, found)
    if "adapters" in here:
        entrants, facts = adapted.steps(vs, remat, dtypes)
        compete("adapters", entrants, facts, rounds, found)
    if "large" in here:
        large.run(found, report)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=2) + "\n")
    print(f"\nall figures are in {out}")
    if page is not None:
        table.write(page, found, sys.argv[1:], place)
        print(f"the table of {page} is written")


def rivals(vs: str, parts: Sequence[str]) -> tuple[str, ...]:
    """List the packages that the rivals need."""
    return () if vs == "none" else ("torch", "transformers", *(("peft",) if "adapters" in parts else ()))


def require(packages: Sequence[str]) -> None:
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        sys.exit(f"bench.py: --vs torch needs {' and '.join(missing)}, which this environment lacks")


def versions(packages: Sequence[str]) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jaxlib", "equinox", *packages)}


def steps(vs: str, remat: Sequence[Any], dtypes: Sequence[str]) -> tuple[dict[str, Callable], dict[str, Row]]:
    """Return the entrants of the training step, and the FLOPs and tokens of each."""
    sizes, entrants, facts = ours.Sizes(), {}, {}
    for dtype in dtypes:
        for policy in remat:
            name = f"zoo, {dtype}, remat={policy}"
            entrants[name], facts[name] = our_step(sizes, dtype, policy)
        if vs == "torch":
            from scripts.benchmarks import pytorch

            for compiled in (False, True):
                name = f"torch, {dtype}, {'compiled' if compiled else 'eager'}"
                entrants[name] = pytorch.Training(sizes, dtype, compiled=compiled)
                facts[name] = work(sizes, dtype)
    return entrants, facts


def mixtures(vs: str, remat: Sequence[Any], dtypes: Sequence[str]) -> tuple[dict[str, Callable], dict[str, Row]]:
    """Return the entrants of the mixture's step, and of the dense model with as many active parameters."""
    sizes, dense, entrants, facts = ours.MIXTURE, ours.Sizes(), {}, {}
    for dtype in dtypes:
        for policy in remat:
            for kind, own in (("mixture", sizes), ("dense", dense)):
                name = f"zoo {kind}, {dtype}, remat={policy}"
                entrants[name], facts[name] = our_step(own, dtype, policy)
        if vs == "torch":
            from scripts.benchmarks import pytorch

            for experts, compiled in (("eager", False), ("grouped_mm", False), ("grouped_mm", True)):
                name = f"torch mixture, {dtype}, {experts}{', compiled' if compiled else ''}"
                entrants[name] = pytorch.Training(sizes, dtype, compiled=compiled, experts=experts)
                facts[name] = work(sizes, dtype)
    return entrants, facts


def our_step(sizes: ours.Sizes, dtype: str, policy: Any) -> tuple[Callable, Row]:
    run = ours.Training(sizes, dtype, policy)
    return run, work(sizes, dtype) | run.executed()


def work(sizes: ours.Sizes, dtype: str) -> Row:
    """Return the FLOPs and tokens of a step, the same for all entrants."""
    return {"dtype": dtype, "flops": sizes.model_flops, "tokens": sizes.batch * sizes.seq}


def grouped_products() -> tuple[dict[str, Callable], dict[str, Row]]:
    """Return the entrants of the grouped product: even and uneven loads, idle experts, the dense product of the same
    size, and `lax.ragged_dot`."""
    form, dealt, entrants, facts = grouped_matmul.grouped_matmul, ours.loads, {}, {}
    for gradient in (False, True):
        also = ", with gradient" if gradient else ""
        kinds = {
            "dense, 8 of 512 rows": (ours.batched, dealt(8, 8)),
            "8 experts, 512 rows each": (form, dealt(8, 8)),
            "8 experts, 114 to 910 rows": (form, dealt(8, 8, uneven=True)),
            "64 experts, 64 rows each": (form, dealt(64, 64)),
            "64 experts, 512 rows for 8 of them": (form, dealt(64, 8)),
            "lax.ragged_dot, 8 experts, 512 rows each": (grouped_matmul.grouped_matmul_ragged, dealt(8, 8)),
        }
        for name, (kind, loads) in kinds.items():
            entrants[name + also] = run = ours.GroupedMatmul(kind, loads, gradient=gradient)
            facts[name + also] = {"dtype": "float32", "flops": run.flops, "tokens": run.ROWS}
    return entrants, facts


def decoding(vs: str) -> tuple[dict[str, Callable], dict[str, Row]]:
    sizes, new, entrants, facts = ours.Sizes(), NEW_TOKENS, {}, {}
    for batch in (1, 8):
        name = f"zoo, batch {batch}"
        entrants[name] = run = ours.Decoding(sizes, batch, new=new)
        facts[name] = {"bytes_needed": run.bytes_a_token() * new, "tokens": batch * new}
        if vs == "torch":
            from scripts.benchmarks import pytorch

            entrants[f"transformers, batch {batch}"] = pytorch.Decoding(sizes, batch, new=new)
            facts[f"transformers, batch {batch}"] = dict(facts[name])
    return entrants, facts


def compete(part: str, entrants: dict[str, Callable], facts: dict[str, Row], rounds: int, found: dict) -> None:
    """Warm up all entrants, time them in turn, and report each with its share of the ceilings."""
    print(f"\n{part}: {rounds} rounds of {len(entrants)} entrants", flush=True)
    for run in entrants.values():
        run()
    ceilings = measure.ceilings()
    timings = measure.contest({**entrants, **ceilings}, rounds)
    rates = measure.rates(timings)
    found.setdefault("ceilings", {})[part] = rates
    print(
        "  "
        + "; ".join(f"{name} {rate / 1e9:,.0f} G{'B' if name == 'copy' else 'FLOP'}/s" for name, rate in rates.items())
    )
    for name in entrants:
        report(found, part, name, timings[name], facts[name], rates)


def report(found: dict, part: str, name: str, timing: Timing, facts: Row, rates: dict[str, float]) -> None:
    """Record and print the result of one entrant."""
    row: Row = {"part": part, "name": name, **vars(timing), **facts}
    line = (
        f"  {name:38} {timing.median:8.3f} s  ({timing.low:.3f} to {timing.high:.3f}, shortest {timing.shortest:.3f})"
    )
    if "tokens" in facts:
        row["tokens_per_second"] = facts["tokens"] / timing.median
        line += f"  {row['tokens_per_second']:10,.0f} tokens/s"
    if "flops" in facts:
        row["share"] = facts["flops"] / timing.shortest / rates[f"matmul {facts['dtype']}"]
        line += f"  {row['share']:4.0%} of the matmul rate"
    if "bytes_needed" in facts:
        row["share"] = facts["bytes_needed"] / timing.shortest / rates["copy"]
        line += f"  {row['share']:4.0%} of the copy rate"
    if "bytes_passed" in facts:
        row["copy_share"] = facts["bytes_passed"] / timing.shortest / rates["copy"]
        line += f"  {row['copy_share']:4.0%} of the copy rate"
    if "bytes_learning" in facts:
        kinds = {"bytes_parameters": "parameters", "bytes_learning": "gradients and moments", "temporaries": "else"}
        line += "  MB: " + ", ".join(f"{facts[key] / 1e6:.1f} {word}" for key, word in kinds.items() if facts.get(key))
    if "bytes_remembered" in facts:
        line += f"  {facts['bytes_remembered'] / 1e6:,.2f} MB remembered"
    found["rows"].append(row)
    print(line, flush=True)


def first_steps(vs: str, depths: Sequence[int], rounds: int, found: dict) -> None:
    """Measure the time to the first step, each in a new process without a cache."""
    sides = {"zoo": "from scripts.benchmarks import ours; found = ours.first_step({})"}
    if vs == "torch":
        sides["torch, eager"] = "from scripts.benchmarks import pytorch; found = pytorch.first_step({}, compiled=False)"
        sides["torch, compiled"] = (
            "from scripts.benchmarks import pytorch; found = pytorch.first_step({}, compiled=True)"
        )
    print(f"\nfirst step: {rounds} rounds of new processes", flush=True)
    results: dict[str, list[dict[str, float]]] = {f"{name}, {depth} layers": [] for depth in depths for name in sides}
    for _ in range(rounds):
        for depth in depths:
            for name, source in sides.items():
                results[f"{name}, {depth} layers"].append(in_new_process(source.format(depth)))
    for name, each in results.items():
        born, later = (statistics.median(row[key] for row in each) for key in ("born", "later"))
        timing = Timing.of([row["first"] for row in each])
        facts = {"born": born, "later": later, "compiling": timing.median - later}
        report(found, "first step", name, timing, facts, {})
        print(f"    {facts['compiling']:.2f} s more than a later step; model and optimizer were made in {born:.2f} s")


def in_new_process(source: str) -> dict[str, float]:
    """Run `source` in a new process and return its variable `found`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    clean["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    words = [sys.executable, "-c", f"import json; {source}; print(json.dumps(found))"]
    done = subprocess.run(words, cwd=Path(__file__).parents[1], env=clean, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"bench.py: a process for the first step failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    tyro.cli(main)
