"""The process of a check: runs the programs that the folder lacks, and writes a row for each as soon as it has one."""

import gc
import time
from pathlib import Path
from typing import Literal

import jax

import zoo

from .check import Check, compile_program, describe_environment, find_lacking, read_rows, time_program, write_row
from .checks import CHECKS

Mode = Literal["gpu", "toy", "ahead"]


def run_checks(names: list[str], folder: str, mode: Mode, seconds: str) -> None:
    """Run the checks of these names until `seconds` are over. A program that fails leaves a row that says why."""
    end = time.monotonic() + float(seconds)
    longest = 0.0
    for check in (check for check in CHECKS if check.name in names):
        for program in find_lacking(check, read_rows(Path(folder)), mode == "toy"):
            start = time.monotonic()
            if start + longest > end:
                return
            try:
                refuse_small_device(check, mode)
                if mode == "ahead":
                    found = compile_program(program, zoo.parallel.imagined("h100:1")[0])
                else:
                    found = time_program(program, 1 if mode == "toy" else 8)
            except (Exception, SystemExit) as error:
                found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            card = {"card": "h100:1, imagined"} if mode == "ahead" else {}
            write_row(Path(folder), check, program.name, {**describe_environment(), **card, **found})
            longest = max(longest, time.monotonic() - start)
            gc.collect()


def refuse_small_device(check: Check, mode: Mode) -> None:
    """**Raises** `MemoryError` on a GPU that has less memory than the check needs."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if mode == "gpu" and limit is not None and limit < check.gigabytes * 1e9:
        raise MemoryError(f"it needs {check.gigabytes} GB, and JAX has {limit / 1e9:.0f} of this device")
