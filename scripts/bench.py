"""Benchmark of the library: training steps, time to first step, decoding; against the machine's peak and PyTorch.

    python scripts/bench.py                              # training step, first step, decoding: about ten minutes
    python scripts/bench.py --vs torch                   # everything that has a rival in torch and transformers
    python scripts/bench.py --parts step --rounds 30 --remat full elementwise attention+mlp_hidden
    python scripts/bench.py --parts large                # on an accelerator: a model of a billion parameters
    python scripts/bench.py --vs torch --page docs/performance.md    # write the tables of this kind of processor
    python scripts/bench.py --vs torch --parts mixture grouped --page docs/moe.md    # mixtures of experts
    python scripts/bench.py --vs torch --parts adapters --page docs/adapters.md    # LoRA, DoRA, QLoRA, against PEFT
    python scripts/bench.py --parts data                 # records to tokens, batches, plans of packed rows
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

from scripts.benchmarks import (
    adapted,
    data,
    entrants,
    large,
    long_context,
    measure,
    ours,
    recurrences,
    rollouts,
    starts,
    table,
)
from scripts.benchmarks.entrants import Row
from scripts.benchmarks.measure import Timing

Part = Literal[
    "step",
    "first",
    "starts",
    "decode",
    "mixture",
    "recurrent",
    "attention",
    "prefill",
    "long",
    "grouped",
    "recurrences",
    "continued",
    "rollouts",
    "adapters",
    "data",
    "large",
]
DEFAULT: dict[str, tuple[Part, ...]] = {
    "none": ("step", "first", "decode"),
    "torch": ("step", "first", "starts", "decode", "mixture", "recurrent", "attention", "prefill", "long"),
}
"""Parts by rival, if none are asked for."""
LONGEST_STEP = 8192
"""Tokens in a row of a training step; attention and prefill take longer rows, too."""


def main(
    *,
    parts: tuple[Part, ...] = (),
    vs: Literal["none", "torch"] = "none",
    rounds: int = 15,
    remat: tuple[str, ...] = ("none", "elementwise"),
    loops: tuple[Literal["auto", "scan", "plain"], ...] = ("auto",),
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16"),
    depths: tuple[int, ...] = (12, 48),
    lengths: tuple[int, ...] = (2048, 8192),
    contexts: tuple[int, ...] = (2048, 8192, 32768),
    operations: tuple[str, ...] = tuple(recurrences.OPERATIONS),
    slow: bool = False,
    out: Path = Path("runs/bench.json"),
    page: Path | None = None,
    place: str = "",
) -> None:
    """Run the benchmarks, print a line per entrant, and write all figures as JSON.

    Args:
        parts: Benchmarks to run: `step`, a training step; `first`, time to the first step; `starts`, seconds from a
            command to its first step or token; `decode`; `mixture`, a step of a mixture of experts and of the dense
            model with as many active parameters; `recurrent`, steps of recurrent models; `attention`, `prefill` and
            `long`, a training step, at long contexts; `grouped`, the grouped matrix product; `recurrences`, single
            recurrent operations; `continued`, decoding after short and long prompts; `rollouts`, decoding after a
            shared prefix, of several samples, and with drafts; `adapters`, steps that train a LoRA, a DoRA or a QLoRA,
            all parameters, and PEFT's; `data`, tokens of records, batches and plans of packed rows; `large`, a model of
            a billion parameters. By default `step`, `first` and `decode`, against a rival all up to `long`, and on an
            accelerator `large` too.
        rounds: Runs per entrant; a tenth of it, at least two, for new processes and for files of records.
        remat: Rematerialization policies of our step, one entrant each: none, elementwise, dots, full, or names of
            activations to save, joined by a plus.
        loops: Loops over the layers of our step; one entrant each.
        dtypes: Compute dtypes.
        depths: Numbers of layers for the time to the first step.
        lengths: Sequence lengths for the recurrences.
        contexts: Lengths for attention and prefill; training steps leave out those above 8,192 tokens.
        operations: Recurrences to run.
        slow: Include rivals whose step takes a minute: transformers' Mamba, token by token.
        out: Path of the JSON.
        page: A page whose table, between two markers, to rewrite.
        place: Name of the table, if the page has several: the word after the colon in its first marker.
    """
    require(rivals(vs, parts))
    for word in remat:
        ours.parse_policy(word)
    if page is not None:
        table.check(page, place)
    here = parts or (*DEFAULT[vs], *(("large",) if jax.default_backend() != "cpu" else ()))
    found: dict[str, Any] = {"date": datetime.date.today().isoformat(), "machine": measure.machine(), "rows": []}
    found["versions"] = versions(rivals(vs, here))
    for name, value in {**found["machine"], **found["versions"]}.items():
        print(f"{name:>12}  {value}")
    contests: dict[str, tuple[str, Callable[[], entrants.Entrants], int]] = {
        "step": ("training step", lambda: entrants.steps(vs, remat, loops, dtypes), rounds),
        "decode": ("decoding", lambda: entrants.decoding(vs), rounds),
        "mixture": ("mixture of experts", lambda: entrants.mixtures(vs, remat, loops, dtypes), rounds),
        "recurrent": ("recurrent models", lambda: recurrences.steps(vs, remat, loops, slow=slow), rounds),
        "grouped": ("grouped product", entrants.grouped_products, 3 * rounds),
        "recurrences": ("recurrences", lambda: recurrences.single_operations(operations, lengths), rounds),
        "continued": ("tokens after a prompt", recurrences.decoding_steps, rounds),
        "rollouts": ("rollouts", lambda: rollouts.rollouts(vs), rounds),
        "adapters": ("adapters", lambda: adapted.steps(vs, remat, dtypes), rounds),
    }
    by_length: dict[str, tuple[str, Callable[[int], entrants.Entrants]]] = {
        "attention": ("attention", lambda seq: long_context.attentions(vs, seq)),
        "prefill": ("prefill", lambda seq: long_context.prefills(vs, seq)),
        "long": ("training step on one row", lambda seq: long_context.steps(vs, seq, remat[0])),
    }
    for part in here:
        if part == "first":
            first_steps(vs, depths, max(2, rounds // 10), found)
        elif part == "starts":
            start_up(max(3, rounds // 3), found)
        elif part == "data":
            read_data(max(2, rounds // 10), found)
        elif part in contests:
            title, make, count = contests[part]
            compete(title, *make(), count, found)
        elif part in by_length:
            title, make_of = by_length[part]
            for seq in contexts:
                if part != "long" or seq <= LONGEST_STEP:
                    compete(title, *make_of(seq), max(2, min(rounds, rounds * 4096 // seq)), found)
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


def compete(part: str, runs: dict[str, Callable], facts: dict[str, Row], rounds: int, found: dict) -> None:
    """Warm up all entrants, time them in turn, and report each with its share of the ceilings."""
    print(f"\n{part}: {rounds} rounds of {len(runs)} entrants", flush=True)
    for run in runs.values():
        run()
    ceilings = measure.ceilings()
    timings = measure.contest({**runs, **ceilings}, rounds)
    rates = measure.rates(timings)
    found.setdefault("ceilings", {})[part] = rates
    print(
        "  "
        + "; ".join(f"{name} {rate / 1e9:,.0f} G{'B' if name == 'copy' else 'FLOP'}/s" for name, rate in rates.items())
    )
    for name in runs:
        row = dict(facts[name])
        if known := [rival for rival in row.pop("rivals", ()) if rival in timings]:
            best = min(known, key=lambda rival: timings[rival].median)
            row |= {"rival": best, "ratio": timings[name].relative_to(timings[best])}
        report(found, part, name, timings[name], row, rates)


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
    if "ratio" in facts:
        line += f"  {facts['ratio']:.2f} of {facts['rival']}"
    if "bytes_needed" in facts:
        row["share"] = facts["bytes_needed"] / timing.shortest / rates["copy"]
        line += f"  {row['share']:4.0%} of the copy rate"
    if "bytes_read" in facts:
        row["bytes_per_second"] = facts["bytes_read"] / timing.median
        line += f"  {row['bytes_per_second'] / 1e6:.2f} MB/s"
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


def start_up(rounds: int, found: dict) -> None:
    """Measure the seconds from a command to its first step or token."""
    print("\nstart-up: new processes, with a compilation cache", flush=True)
    for name, timing in starts.measure_starts(rounds).items():
        report(found, "start-up", name, timing, {}, {})


def read_data(rounds: int, found: dict) -> None:
    """Measure what comes before a step: tokens of records, batches, plans."""
    print("\ndata: files of records, and tokens in memory", flush=True)
    for part, measured in data.measure_data(rounds).items():
        for name, (timing, facts) in measured.items():
            report(found, part, name, timing, facts, {})


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


def in_new_process(source: str, cache: str | None = None) -> dict[str, float]:
    """Run `source` in a new process and return its variable `found`. `cache` is a folder for compiled programs."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    if cache is not None:
        clean |= {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    clean["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    words = [sys.executable, "-c", f"import json; {source}; print(json.dumps(found))"]
    done = subprocess.run(words, cwd=Path(__file__).parents[1], env=clean, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"bench.py: a process for the first step failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    tyro.cli(main)
