"""Compile a training step in several ways, and tell how much of its communication products hide.

    python scripts/exposed.py                                                  # the table of docs/compilers.md
    python scripts/exposed.py --embed 4096 --heads 32 --mlp 14336 --seq-len 4096 --only "scan over layers"
    python scripts/exposed.py --on v5e:2x4 --only "gathering ahead"

Needs the extra aot-cuda or aot-tpu, and JAX_PLATFORMS=cpu. A row takes a minute or two of a core for GPUs, and several
for TPUs. XLA reads its flags when a process starts, so every step is compiled in a process of its own.
"""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import tyro

import zoo
from zoo import configure
from zoo.inspect import compiled
from zoo.inspect.format import format_decimal_prefix
from zoo.inspect.program import CompiledProgram
from zoo.models.loop import Loop
from zoo.tools.plan.options import TrainingOptions
from zoo.tools.plan.training import make_training_step

_PIPELINED = "--xla_gpu_enable_pipelined_all_gather=true --xla_gpu_enable_pipelined_reduce_scatter=true"
STEPS: dict[str, dict[str, str]] = {
    "scan over layers": {},
    "the same, pipelined collectives": {"XLA_FLAGS": _PIPELINED},
    "the same, `JAX_OPTIMIZATION_LEVEL=O1`": {"JAX_OPTIMIZATION_LEVEL": "O1"},
    "plain loop": {},
    "gathering ahead": {},
}
"""Steps of the table, and the environment variables that each is compiled with."""
LOOPS: dict[str, Loop] = {"plain loop": "plain", "gathering ahead": "ahead"}
"""Loops of the steps that are not a scan."""
_COLUMNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "forward gathers": ("all-gather", ("forward",)),
    "backward gathers": ("all-gather", ("recomputed", "backward")),
    "scatters": ("reduce-scatter", ("backward",)),
}
"""Kind and phases of the collectives of each column."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A Transformer and its batch."""

    vocab: int = 4096
    embed: int = 1024
    layers: int = 8
    heads: int = 16
    mlp: int = 2816
    rows: int = 8
    seq_len: int = 1024


def main(*, sizes: tyro.conf.OmitArgPrefixes[Sizes] = Sizes(), on: str = "h100:8", only: str = "") -> None:
    """Print a row per step.

    Args:
        sizes: Of the model and the batch.
        on: Devices to compile for; fsdp takes all of them.
        only: Compile this step, in this process.
    """
    if only:
        print(format_row(only, compile_step(sizes, on, LOOPS.get(only, "scan"))), flush=True)
        return
    columns = ["step", *_COLUMNS, "on the links", "exposed", "peak"]
    print(f"| {' | '.join(columns)} |\n|---|{'---|' * len(_COLUMNS)}--:|--:|--:|", flush=True)
    for name, variables in STEPS.items():
        command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--only", name]
        subprocess.run(command, env={**os.environ, **variables}, check=True)


def compile_step(sizes: Sizes, on: str, loop: Loop) -> CompiledProgram:
    """Compile the training step of `zoo plan`: ZeRO-3, remat full, bfloat16, AdamW."""
    devices = zoo.parallel.imagined(on)
    mesh = zoo.make_mesh(data=1, fsdp=len(devices), devices=devices)
    model = {name: getattr(sizes, name) for name in ("vocab", "embed", "layers", "heads", "mlp")}

    def make(key):
        return configure(zoo.models.Transformer(**model, key=key), loop=loop)

    step, arguments = make_training_step(make, mesh, TrainingOptions(sizes.rows, sizes.seq_len))
    return compiled(step, *arguments)


def format_row(name: str, program: CompiledProgram) -> str:
    """Format a row of the table."""
    if program.exposed_seconds is None or program.memory is None or program.memory.peak is None:
        raise ValueError(f"{name}: no schedule and chip are known for {program.platform}; compile for h100 or a TPU")
    cells = [_format_collectives(program, *which) for which in _COLUMNS.values()]
    links = sum(row.link_seconds or 0 for row in program.collectives)
    peak = format_decimal_prefix(program.memory.peak)
    seconds = [f"{1000 * value:.3g} ms" for value in (links, program.exposed_seconds)]
    return f"| {' | '.join([name, *cells, *seconds, f'{peak}B'])} |"


def _format_collectives(program: CompiledProgram, kind: str, phases: tuple[str, ...]) -> str:
    """Format how many products run between start and done, in the loop over layers if there is one, and the exposed
    share of all."""
    rows = [row for row in program.schedule or () if row.kind == kind and row.phase in phases]
    if not rows:
        return "none"
    repeated = [row for row in rows if row.times == max(row.times for row in rows)]
    between = sorted({row.products // row.times for row in repeated})
    products = str(between[0]) if len(between) == 1 else f"{between[0]} to {between[-1]}"
    exposed = sum(row.exposed_seconds or 0 for row in rows) / sum(row.link_seconds or 0 for row in rows)
    return f"{products}; {exposed:.0%}"


if __name__ == "__main__":
    tyro.cli(main)
