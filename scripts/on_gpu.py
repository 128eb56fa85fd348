"""Checks of one GPU, a quarter of an hour at a time: kernels, steps, recurrences, decoding, beside their rivals.

    python scripts/on_gpu.py --list                   # the checks, their estimates, and the packages that are missing
    python scripts/on_gpu.py --budget 840             # what fits into 14 minutes; another call goes on from there
    python scripts/on_gpu.py kernels step             # these two, and their rivals
    python scripts/on_gpu.py --dry-run                # every check at toy size, on a CPU
    python scripts/on_gpu.py --ahead step decoding    # compiled for an H100 that is not here (needs aot-cuda)
    python scripts/on_gpu.py --page runs/gpu          # the tables of docs/gpu.md

A check runs in a process of its own, which appends a row to rows.jsonl as soon as it has one: a check that is stopped
keeps its rows and goes on after them. A program that fails leaves a row that says why, and is not run again.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import tyro

from scripts.gpu_checks.check import Check, find_lacking, read_rows, write_row
from scripts.gpu_checks.checks import CHECKS
from scripts.gpu_checks.page import format_page
from scripts.gpu_checks.process import Mode
from zoo.parallel.devices import use_cpu

ROOT = Path(__file__).parents[1]
RESERVE = 5.0
"""Seconds of the budget that are left for ending a process."""
SLACK = 60
"""Seconds beyond three times its estimate after which a check is stopped."""
_CHILD = "import sys; from scripts.gpu_checks.process import run_checks as run; run(sys.argv[4:], *sys.argv[1:4])"


def main(
    names: tyro.conf.Positional[tuple[str, ...]] = (),
    *,
    budget: float = 840,
    out: Path = Path("runs/gpu"),
    dry_run: bool = False,
    ahead: bool = False,
    list_checks: Annotated[bool, tyro.conf.arg(name="list")] = False,
    page: Path | None = None,
) -> None:
    """Run checks until the budget is used up.

    Args:
        names: Checks to run, all by default. A name stands for its rivals, too: `step` and `step/torch`.
        budget: Seconds for all of them together.
        out: Folder of the rows, and of compiled programs.
        dry_run: Run every check at toy size on the CPU. Rows go to the folder dry-run in `out`.
        ahead: Compile for an H100 instead, without a GPU. Rows go to the folder ahead in `out`.
        list_checks: Print the checks, and run nothing.
        page: Print the tables of the rows in this folder, and run nothing.
    """
    use_cpu()  # this process leaves the GPU to the others
    if page is not None:
        print(format_page(read_rows(page)))
        return
    mode: Mode = "toy" if dry_run else "ahead" if ahead else "gpu"
    folder = out / {"toy": "dry-run", "ahead": "ahead", "gpu": "."}[mode]
    checks = choose_checks(names)
    describe(checks, folder, mode)
    if not list_checks:
        run(checks, folder, mode, budget)


def choose_checks(names: tuple[str, ...]) -> list[Check]:
    """Return the checks of these names, and their rivals.

    **Raises** `SystemExit` for an unknown name.
    """
    known = [check.name for check in CHECKS]
    if unknown := set(names) - set(known):
        sys.exit(f"on_gpu.py: no check {min(unknown)!r}; there are {', '.join(known)}")
    return [check for check in CHECKS if not names or check.name in names or check.name.partition("/")[0] in names]


def describe(checks: list[Check], folder: Path, mode: Mode) -> None:
    """Print each check with its estimate and what is missing."""
    rows = read_rows(folder)
    for check in checks:
        programs, lacking = len(check.programs(mode == "toy")), len(find_lacking(check, rows, mode == "toy"))
        missing = f"  missing: {', '.join(check.missing)}" if check.missing else ""
        print(f"{check.name:24} {check.seconds:4.0f} s  {programs - lacking:2} of {programs:2} rows{missing}")


def run(checks: list[Check], folder: Path, mode: Mode, budget: float) -> None:
    """Run each check in a process, all in one for a dry run, and stop before the budget is used up."""
    end = time.monotonic() + budget - RESERVE
    toy = mode == "toy"
    for check in checks:
        if check.missing and not any(row["check"] == check.name for row in read_rows(folder)):
            write_row(folder, check, "", {"failed": f"missing: {', '.join(check.missing)}"})
    ready = [check for check in checks if not check.missing]
    for group in [ready] if mode != "gpu" else [[check] for check in ready]:
        while lacking := [(check, p) for check in group for p in find_lacking(check, read_rows(folder), toy)]:
            left = end - time.monotonic()
            estimate = sum(check.seconds / len(check.programs(toy)) for check, _ in lacking)
            if left < (estimate if mode == "gpu" else 0):
                print(f"{group[0].name}: {estimate:.0f} s, and {max(left, 0):.0f} s of the budget are left")
                break
            limit = min(left, 3 * estimate + SLACK) if mode == "gpu" else left
            status = start_process(group, folder, mode, limit)
            if status == 0 or (status is None and limit == left):
                break
            reason = f"no result within {limit:.0f} s" if status is None else f"its process ended with status {status}"
            check, program = next((c, p) for c in group for p in find_lacking(c, read_rows(folder), toy))
            write_row(folder, check, program.name, {"failed": reason})


def start_process(group: list[Check], folder: Path, mode: Mode, limit: float) -> int | None:
    """Run checks in a new process; return its status, or None if it was stopped after `limit` seconds."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str((folder / "cache").resolve())}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    if mode == "gpu":
        own = dict(group[0].environment)
    else:
        flags = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0" * (mode == "toy")
        own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    words = [sys.executable, "-c", _CHILD, str(folder.resolve()), mode, str(limit), *(check.name for check in group)]
    process = subprocess.Popen(words, cwd=ROOT, env=os.environ | cache | own, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
            process.wait()


if __name__ == "__main__":
    tyro.cli(main)
