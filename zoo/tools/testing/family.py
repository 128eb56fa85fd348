"""Check a ported family by a checkpoint: promises of the model, files written and read again, PyTorch's numbers."""

import dataclasses
import re
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from zoo.generate.run import generate
from zoo.models import Decoder
from zoo.models.hf.spec import Family
from zoo.models.parameter_paths import find_differences
from zoo.parallel import Mesh
from zoo.weights.directory import CONFIG_NAME
from zoo.weights.load import load
from zoo.weights.safetensors import open_tensors, read_json
from zoo.weights.save import save

from ..parity.checkpoint import EXPECTED_FILE, compare_checkpoint, read_expectations, read_gradient_norms
from .checks import Check, CheckReport, Difference, join_flaws, run_checks
from .mixer import check_subject
from .subject import DecoderSubject

_PROMPT = ((5, 4, 3, 2), (6, 7, 8, 9))
_PADDING = (0, 2)
_NEW_TOKENS = 4


def check_family(
    directory: str | Path,
    *,
    family: Family | None = None,
    seq_len: int = 6,
    meshes: Sequence[Mesh] | None = None,
) -> CheckReport:
    """Check the model in a Hugging Face directory, and return a report of the largest differences, which `print` shows.

    The checks of `check_mixer`, with the whole model from the first layer's input to the logits, and:

    - `generate = read`: with a padded prompt, the greedy tokens of `zoo.generate` are the most likely ones of a full
      pass.
    - `save = load`: tensors are written bit for bit as they were in the file, except tensors that the family ignores,
      and read again as the same model.
    - `config`: the saved config.json has the same keys and values.
    - `PyTorch`: activations, loss and gradients agree with the results in `expected.safetensors`, if it is in the
      directory, as `zoo parity` compares them; with a `meta.json` next to it, the norms of all gradients too.

    Take a small checkpoint, such as one with random weights: everything is computed in float32, gradients too.

    - `family`: as for `zoo.load`. `seq_len` and `meshes`: as for `check_mixer`.

    **Raises** `AssertionError` with one line for each check that failed, and `CheckpointError` as `zoo.load` does.
    """
    directory = Path(directory)
    model = load(directory, dtype=jnp.float32, family=family)
    plain = dataclasses.replace(model, origin=None)  # models from different files share compiled programs
    report = check_subject(DecoderSubject(plain), None, seq_len, {}, meshes)
    checks = [
        *report.checks,
        *run_checks("generate = read", "greedy tokens", partial(_check_generation, plain)),
        *run_checks("save = load", "files", partial(_check_files, directory, family)),
        *run_checks("PyTorch", "activations and gradients", partial(_check_parity, directory, family)),
    ]
    name = "model" if model.origin is None else model.origin.family.name
    report = CheckReport(name, tuple(checks))
    report.raise_failures()
    return report


def _check_generation(model: Decoder) -> Iterator[Check]:
    """Generate after prompts of two lengths, and check in the logits of the full text that no token is more likely."""
    prompt = np.asarray(_PROMPT) % model.embedding.table_shape[0]
    mask = np.arange(prompt.shape[1]) >= np.asarray(_PADDING)[:, None]
    length = prompt.shape[1] + _NEW_TOKENS
    new = generate(model, jnp.asarray(prompt), mask=jnp.asarray(mask), max_new_tokens=_NEW_TOKENS, length=length)
    text = np.concatenate([prompt, np.asarray(new)], axis=1)
    is_real = np.pad(mask, [(0, 0), (0, _NEW_TOKENS)], constant_values=True)
    logits = np.asarray(_read_tokens(model, text, is_real))[:, -_NEW_TOKENS - 1 : -1]
    chosen = np.take_along_axis(logits, np.asarray(new)[..., None], axis=-1)[..., 0]
    behind = (logits.max(-1) - chosen) / np.abs(logits).max()
    row, step = np.unravel_index(np.argmax(behind), behind.shape)
    yield Check(
        "generate = read",
        "logits of the greedy tokens, and the largest of a full pass",
        Difference(float(behind[row, step]), f"new token {step} of row {row}"),
        cause="States differ from reading, see the checks before; or a block keeps no state of its own.",
    )


@eqx.filter_jit
def _read_tokens(model: Decoder, tokens: Any, mask: Any) -> Any:
    return model(tokens, mask=mask)


def _check_files(directory: Path, family: Family | None) -> Iterator[Check]:
    """Save the model as it is stored, and compare tensors, config and the reloaded model."""
    config = read_json(directory / CONFIG_NAME)
    read = partial(load, family=family, packed="quantization_config" in config)
    model = read(directory)
    assert model.origin is not None  # it was loaded
    with tempfile.TemporaryDirectory() as copy:
        save(jax.tree.map(np.asarray, model), copy, source=directory)
        again = read(copy)
        saved_config = read_json(Path(copy) / CONFIG_NAME)
        places = _compare_files(directory, Path(copy), model.origin.family)
    places += [f"read again, {difference}" for difference in find_differences(again, model)]
    if not places and not _is_bitwise_equal(again, model):
        places = ["read again, numbers differ"]
    cause = "The table of names loses a part of a tensor, or two entries write one."
    yield Check("save = load", "tensors of the saved files, and of the directory", join_flaws(places), cause=cause)
    keys = sorted(key for key in config.keys() | saved_config.keys() if config.get(key) != saved_config.get(key))
    places = [f"{key} is {saved_config.get(key)!r}, and was {config.get(key)!r}" for key in keys]
    yield Check("config", f"keys of the saved {CONFIG_NAME}, and of the directory's", join_flaws(places))


def _compare_files(directory: Path, copy: Path, family: Family) -> list[str]:
    original = open_tensors(directory)
    saved = open_tensors(copy)
    places = [f"{name} is new" for name in saved.keys() - original.keys()]
    for name, tensor in original.items():
        if name not in saved:
            if not any(re.search(pattern, name) for pattern in family.ignored_tensors):
                places.append(f"{name} is missing")
        elif saved[name].dtype != tensor.dtype or saved[name].read().tobytes() != tensor.read().tobytes():
            places.append(f"{name} has other bits")
    return sorted(places)


def _is_bitwise_equal(first: Any, second: Any) -> bool:
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def _check_parity(directory: Path, family: Family | None) -> Iterator[Check]:
    """Compare with stored results of PyTorch, in float32."""
    file = directory / EXPECTED_FILE
    if not file.is_file():
        cause = f"there is no {EXPECTED_FILE} next to the weights; `zoo parity` computes one with transformers"
        yield Check("PyTorch", "", cause=cause)
        return
    expected = {name: x for name, x in read_expectations(file).items() if not name.startswith("bfloat16.")}
    report = compare_checkpoint(directory, expected, gradient_norms=read_gradient_norms(directory), family=family)
    worst = report.first_failure or max(report.comparisons, key=lambda line: line.error / line.tolerance)
    error = max(worst.error, worst.own or 0.0)
    compared = f"{len(report.comparisons)} activations and gradients, and PyTorch's"
    cause = "`zoo parity` shows every layer, and each by itself on PyTorch's input to it."
    yield Check("PyTorch", compared, Difference(error, worst.name), worst.tolerance, cause)
