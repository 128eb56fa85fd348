"""A check is a list of programs. The same list is timed on a GPU, tried at toy size on a CPU, and compiled ahead."""

import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from scripts.benchmarks.measure import Timing

ROUNDS = 8
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to time, and what is known of it."""

    name: str
    make: Callable[[Any], Any]
    """Return the entrant for a device: a call runs it and blocks. None is the device here; for an imagined one the
    entrant holds shapes, and its `program` compiles it. A mapping instead of an entrant is the row itself."""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """`tokens` and `flops` of a call, and `rival`, the program to compare with."""
    examine: Callable[[Any], Mapping[str, Any]] = lambda run: {}
    """Return more facts of an entrant that has run once, such as its errors."""


@dataclasses.dataclass(frozen=True)
class Check:
    """Programs that share a process."""

    name: str
    title: str
    make_programs: Callable[[bool], list[Program]]
    """Return the programs, of toy size if True. No device is touched before one of them is made."""
    seconds: float
    """Estimate on an H100, with compilation."""
    packages: tuple[str, ...] = ()
    """Packages besides the library's own."""
    gigabytes: float = 0
    """Memory of the device."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tried: slice = dataclasses.field(default_factory=lambda: slice(None))
    """Programs of the dry run: one of each kind."""

    def programs(self, toy: bool = False) -> list[Program]:
        """Return the programs; for a dry run a few of toy size."""
        return self.make_programs(toy)[self.tried] if toy else self.make_programs(False)

    @property
    def missing(self) -> list[str]:
        """Packages that this environment lacks."""
        return [name for name in self.packages if importlib.util.find_spec(name) is None]


def read_rows(folder: Path) -> list[Row]:
    """Return all rows of a folder, in order."""
    path = folder / "rows.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_row(folder: Path, check: Check, name: str, found: Mapping[str, Any]) -> None:
    """Append a row to the folder, and print it."""
    row = {"check": check.name, "name": name, "date": datetime.date.today().isoformat(), **found}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    brief = {
        key: row[key] for key in ("failed", "median", "peak", "program_flops", "bytes_moved", "verdict") if key in row
    }
    print(f"  {check.name:20} {name:45} {json.dumps(brief)}", flush=True)


def find_lacking(check: Check, rows: list[Row], toy: bool) -> list[Program]:
    """Return the programs of a check that have no row."""
    done = {row["name"] for row in rows if row["check"] == check.name}
    return [program for program in check.programs(toy) if program.name not in done]


def time_program(program: Program, rounds: int = ROUNDS) -> Row:
    """Make a program, run it once, examine it, and time it."""
    before = find_peak()
    run = program.make(None)
    if isinstance(run, Mapping):
        return {**program.facts, **run}
    first = _time(run)
    found = {**program.facts, "first": first, **program.examine(run)}
    calls = getattr(run, "calls", 1)
    timing = Timing.of([_time(run) / calls for _ in range(rounds)])
    found |= {key: value for key, value in vars(timing).items() if key != "seconds"}
    if find_peak() > before:  # the process has one peak: a smaller program after a larger one has none
        found["peak"] = find_peak()
    return found


def compile_program(program: Program, device: Any) -> Row:
    """Compile a program for a device that is not here, and return what the compiler says. Without cuDNN steps have
    blockwise attention."""
    start = time.perf_counter()
    run = program.make(device)
    if not hasattr(run, "program"):
        return {"failed": "there is nothing to compile for a device that is not here"}
    compiled = run.program()
    memory = compiled.memory
    names = {"bytes_a_token": "bytes_needed", "bytes_passed": "bytes_passed"}
    needed = {key: getattr(run, method)() for method, key in names.items() if hasattr(run, method)}
    return {
        **program.facts,
        **needed,
        "seconds": time.perf_counter() - start,
        "has_cudnn": has_cudnn(),
        "peak": memory.peak if memory else None,
        "program_flops": compiled.flops.total,
        "compiled_flops": compiled.compiled_flops,
        "bytes_moved": compiled.bytes_moved,
        "unfused": [[row.bytes, row.times, row.opcode, row.phase, row.scope] for row in compiled.unfused[:12]],
        "endless": list(compiled.endless),
    }


def has_cudnn() -> bool:
    """Return True if programs with cuDNN's kernels can be compiled ahead."""
    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.cudnn") is not None


def describe_environment() -> Row:
    """Return the card and the versions of packages. A rival's process has the card without JAX."""
    card = jax.devices()[0].device_kind
    if program := shutil.which("nvidia-smi"):
        asked = [program, "--query-gpu=name", "--format=csv,noheader"]
        card = (subprocess.run(asked, capture_output=True, text=True).stdout.splitlines() or [card])[0]
    names = ("jax", "equinox", "torch", "transformers", "tokamax", "flash-linear-attention", "peft")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"card": card, "versions": versions}


def find_peak() -> int:
    """Return the largest memory that JAX has had in this process, 0 where it is not counted."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("peak_bytes_in_use", 0)


def _time(run: Callable) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
