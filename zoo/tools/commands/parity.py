"""Implement `zoo parity`: compare a checkpoint with PyTorch, layer by layer, or a training run, step by step."""

import json
import sys
from pathlib import Path
from typing import Annotated

import tyro

from zoo._compile_cache import enable_compile_cache
from zoo._terminal import show
from zoo.models.hf.spec import Family
from zoo.tools.parity import compare_checkpoint, compare_training, read_expectations
from zoo.tools.parity.checkpoint import EXPECTED_FILE, read_gradient_norms
from zoo.tools.parity.comparison import TOLERANCE, ParityReport
from zoo.tools.parity.training_report import TrainingReport
from zoo.weights import load_family
from zoo.weights.directory import resolve_directory
from zoo.weights.from_torch import compute_expectations
from zoo.weights.safetensors import CheckpointError


def parity(
    directory: Annotated[Path | None, tyro.conf.Positional] = None,
    *,
    expected: Path | None = None,
    train: Path | None = None,
    steps: int | None = None,
    family: Path | None = None,
    tolerance: float | None = None,
    every: Annotated[bool, tyro.conf.arg(name="all")] = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    no_compile_cache: bool = False,
) -> None:
    """Compare a checkpoint with PyTorch, layer by layer, and name the first layer that is wrong.

    Compares with stored results, or, if there are none, runs transformers (needs torch and transformers). Errors are
    max |difference| / max |expected|; for gradients, norm of the difference / norm. The column `alone` shows the error
    of each layer by itself, on PyTorch's own input to it.

    With --train, compares training, step by step: trains on the batches of a run that scripts/train_in_torch.py stored,
    and compares the loss and every gradient, moment and weight. Names the first step and tensor out of tolerance, and
    whether the forward pass, the gradient or the optimizer was the first to differ.

    Exits with status 1 if a comparison is out of tolerance.

    Args:
        directory: Checkpoint directory, or a name on the Hugging Face hub.
        expected: Safetensors file of stored results. Default: DIRECTORY/expected.safetensors, if it exists.
        train: Folder of a stored training run, in place of DIRECTORY.
        steps: Number of training steps to compare, from the first on. Default: all that are stored.
        family: Python file that defines a family. Default: the family that the config names.
        tolerance: Maximum error of hidden states and logits in float32; twice that for gradients. With --train, of
            gradients, and a tenth of it for the loss. Default: 1e-4, and 0.2 for training in bfloat16.
        every: Show all gradients, not only the five with the largest errors; with --train, all steps.
        as_json: Print a JSON object.
        no_compile_cache: Compile anew: neither read compiled programs from the user's cache folder nor keep them there.
    """
    if (directory is None) == (train is None):
        raise CheckpointError("expected either a checkpoint directory or --train with the folder of a stored run")
    if train is not None and expected is not None:
        raise CheckpointError("--expected has results of a checkpoint: a run has its own, so leave it out with --train")
    if train is None and steps is not None:
        raise CheckpointError("--steps counts steps of a stored run: it needs --train")
    if not no_compile_cache:
        enable_compile_cache()
    loaded_family = None if family is None else load_family(family)
    if train is not None:
        report = compare_training(train, steps, family=loaded_family, tolerance=tolerance)
        text = report.format(every_step=every)
    else:
        assert directory is not None  # one of the two is given
        report = _compare_checkpoint(directory, expected, loaded_family, TOLERANCE if tolerance is None else tolerance)
        text = report.format(every_gradient=every)
    if as_json:
        show(_format_json(report))
    else:
        show(text)
    if not report.passed:
        sys.exit(1)


def _compare_checkpoint(
    directory: Path, expected: Path | None, family: Family | None, tolerance: float
) -> ParityReport:
    """Compare with stored results, or else with transformers."""
    directory = resolve_directory(directory)
    if expected is None and (directory / EXPECTED_FILE).exists():
        stored = directory / EXPECTED_FILE
    else:
        stored = expected
    if stored is not None and not stored.is_file():
        raise CheckpointError(f"there is no file {stored}")
    if stored is None:
        show("computing with transformers", file=sys.stderr)
        results = compute_expectations(directory)
    else:
        results = read_expectations(stored)
    norms = None
    if stored == directory / EXPECTED_FILE:
        norms = read_gradient_norms(directory)
    return compare_checkpoint(directory, results, gradient_norms=norms, tolerance=tolerance, family=family)


def _format_json(report: ParityReport | TrainingReport) -> str:
    if isinstance(report, TrainingReport):
        first = report.first_failure
        named = None if first is None else {**first._asdict(), "comparison": first.comparison.name}
        steps = []
        for step in report.steps:
            errors = {part: {line.name: line.error for line in lines} for part, lines in step.parts.items()}
            steps.append({"step": step.number, "loss": step.loss, **errors})
        return json.dumps({"passed": report.passed, "first": named, "steps": steps})
    lines = [{**vars(line), "passed": line.passed} for line in report.comparisons]
    return json.dumps(
        {"passed": report.passed, "first": report.first_failure and report.first_failure.name, "lines": lines}
    )
