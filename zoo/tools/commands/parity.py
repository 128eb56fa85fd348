"""Implement `zoo parity`: compare a checkpoint with PyTorch, layer by layer."""

import json
import sys
from pathlib import Path
from typing import Annotated

import tyro

from zoo._compile_cache import enable_compile_cache
from zoo._terminal import align_columns, show
from zoo.models.hf.values import NON_NEGATIVE_NUMBER, optional, table_of
from zoo.tools.parity.compare import TOLERANCE, Comparison, ParityReport, compare, read_expectations
from zoo.weights import CheckpointError, load_family
from zoo.weights.directory import resolve_directory
from zoo.weights.from_torch import compute_expectations
from zoo.weights.safetensors import read_json

_EXPECTED_FILE = "expected.safetensors"


def parity(
    directory: Annotated[Path, tyro.conf.Positional],
    *,
    expected: Path | None = None,
    family: Path | None = None,
    tolerance: float = TOLERANCE,
    every: Annotated[bool, tyro.conf.arg(name="all")] = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    no_compile_cache: bool = False,
) -> None:
    """Compare a checkpoint with PyTorch, layer by layer, and name the first layer that is wrong.

    Compares with stored results, or, if there are none, runs transformers (needs torch and transformers). Errors are
    max |difference| / max |expected|; for gradients, norm of the difference / norm. The column `alone` shows the error
    of each layer by itself, on PyTorch's own input to it. Exits with status 1 if a comparison is out of tolerance.

    Args:
        directory: Checkpoint directory, or a name on the Hugging Face hub.
        expected: Safetensors file of stored results. Default: DIRECTORY/expected.safetensors, if it exists.
        family: Python file that defines a family. Default: the family that the config names.
        tolerance: Maximum error of hidden states and logits in float32; twice that for gradients.
        every: Show all gradients, not only the five with the largest errors.
        as_json: Print a JSON object.
        no_compile_cache: Compile anew: neither read compiled programs from the user's cache folder nor keep them there.
    """
    if not no_compile_cache:
        enable_compile_cache()
    directory = resolve_directory(directory)
    if expected is None and (directory / _EXPECTED_FILE).exists():
        stored = directory / _EXPECTED_FILE
    else:
        stored = expected
    if stored is not None and not stored.is_file():
        raise CheckpointError(f"there is no file {stored}")
    if stored is None:
        show("computing with transformers", file=sys.stderr)
    if stored is None:
        results = compute_expectations(directory)
    else:
        results = read_expectations(stored)
    meta = directory / "meta.json"
    if stored == directory / _EXPECTED_FILE and meta.exists():
        norms = _read_gradient_norms(meta)
    else:
        norms = None
    loaded_family = None if family is None else load_family(family)
    report = compare(
        directory,
        results,
        gradient_norms=norms,
        tolerance=tolerance,
        family=loaded_family,
    )
    if as_json:
        show(_format_json(report))
    else:
        show("\n".join(_format_report(report, every)))
    if not report.passed:
        sys.exit(1)


def _read_gradient_norms(file: Path) -> dict[str, float] | None:
    """Return the norms of PyTorch's gradients by tensor name, if the file has them."""
    norms = read_json(file).get("grad_norm")
    if error := optional(table_of(NON_NEGATIVE_NUMBER)).find_error(norms):
        raise CheckpointError(f"{file}: grad_norm {error}")
    return norms


def _format_json(report: ParityReport) -> str:
    lines = [{**vars(line), "passed": line.passed} for line in report.comparisons]
    return json.dumps(
        {"passed": report.passed, "first": report.first_failure and report.first_failure.name, "lines": lines}
    )


def _format_report(report: ParityReport, every_gradient: bool) -> list[str]:
    computed = [line for line in report.comparisons if "gradient" not in line.name]
    gradients = sorted((line for line in report.comparisons if "gradient" in line.name), key=lambda line: -line.error)
    shown = gradients if every_gradient else gradients[:5]
    head = ["", "float32", "alone", "bfloat16", "PyTorch's", ""]
    table = align_columns([head, *map(_format_line, [*computed, *shown])], right=(1, 2, 3, 4))
    if len(shown) < len(gradients):
        table.append(f"and {len(gradients) - len(shown)} gradients with smaller errors (--all shows them)")
    first = report.first_failure
    if first is None:
        return [*table, "", f"{len(report.comparisons)} comparisons, all within tolerance"]
    failed = sum(not line.passed for line in report.comparisons)
    return [
        *table,
        "",
        f"{failed} of {len(report.comparisons)} comparisons are out of tolerance. Look first at {first.name}",
    ]


def _format_line(line: Comparison) -> list[str]:
    figures = [line.error, line.own, line.bfloat16, line.theirs]
    mark = "" if line.passed else "<- out of tolerance"
    return [line.name, *map(_format_error, figures), mark]


def _format_error(error: float | None) -> str:
    if error is None:
        return ""
    return f"{error:.1e}"
