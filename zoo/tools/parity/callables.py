"""Compare any PyTorch module or function with one in JAX: results, and values inside by a table of names."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from zoo.models.capture import capture

from .comparison import TOLERANCE, Comparison, ParityReport, relative_error
from .hooks import INPUT, list_modules, run_hooked, to_numpy
from .results import pair_results


class _Pair(NamedTuple):
    """One value of theirs, and ours: by its name, and for a star the row of the layer."""

    theirs: str
    ours: str
    row: int | None = None


def compare(
    theirs: Callable,
    ours: Callable,
    inputs: Any = (),
    names: Mapping[str, str] | None = None,
    *,
    tolerance: float = TOLERANCE,
) -> ParityReport:
    """Compare two callables on the same inputs, and name the first value out of tolerance.

        report = zoo.parity.compare(theirs, ours, tokens, {"model.layers.*.self_attn": "layers.*.attention"})
        print(report)

    - `theirs`: a `torch.nn.Module`, called with tensors and without gradients; or a function of NumPy arrays.
    - `ours`: a model, or a function of models, called with JAX arrays, under `jax.jit`.
    - `inputs`: a NumPy array; a tuple of arguments; or a dict of keyword arguments. What is not an array is passed as
      it is.
    - `names`: modules of theirs, as in `named_modules`, to values of ours, as in `zoo.capture`. Either may end in
      `.input`. A star on both sides stands for layers: rows of ours, in the order of the numbers of theirs.
    - `tolerance`: the largest max |ours - theirs| / max |theirs| of a value.

    Values are compared in the order in which theirs computes them, results last. Results are arrays, tuples, or fields
    of dicts and dataclasses, of which the shared ones are compared; `report.notes` has the others. A module runs in the
    mode that it is in: in train mode, BatchNorm moves its running statistics. float64 inputs become float32, unless
    `jax_enable_x64` is set.

    **Raises** `ValueError` for names without a value, for results of different structure, for values of different
    shapes, and if theirs draws random numbers, as dropout does in train mode; `TypeError` for a directory.
    """
    for function in (theirs, ours):
        if isinstance(function, str | Path):
            raise TypeError(
                "compare takes two callables: zoo.parity.compare_checkpoint(directory, expected) compares a checkpoint "
                "with stored results of PyTorch"
            )
        if not callable(function):
            raise TypeError(f"compare takes two callables, and one is {type(function).__name__}")
    args, kwargs = _read_inputs(inputs)
    pairs = _list_pairs(names or {}, list_modules(theirs))
    hooked = run_hooked(theirs, args, kwargs, dict.fromkeys(pair.theirs for pair in pairs))
    result, seen = _run_ours(ours, args, kwargs, dict.fromkeys(pair.ours for pair in pairs))
    results, unpaired = pair_results(hooked.result, result)
    ours_by_name = {pair.theirs: (pair.ours, _take_row(pair, pairs, seen)) for pair in pairs}
    values = [(name, x, *ours_by_name[name]) for name, x in hooked.values.items()]
    values += [(name, to_numpy(x), name, to_numpy(y)) for name, x, y in results]
    differing = [(name, x.shape, own, y.shape) for name, x, own, y in values if x.shape != y.shape]
    if differing:
        listed = "; ".join(f"{name} is {list(x)} and {own} {list(y)}" for name, x, own, y in differing)
        raise ValueError(f"shapes of theirs and ours differ: {listed}")
    comparisons = tuple(Comparison(name, relative_error(y, x), tolerance) for name, x, _, y in values)
    return ParityReport(comparisons, (*hooked.notes, *unpaired))


def _read_inputs(inputs: Any) -> tuple[tuple, dict[str, Any]]:
    """Return positional and keyword arguments, with floats in a dtype that JAX has."""

    def read(x: Any) -> Any:
        if isinstance(x, np.ndarray) and x.dtype == np.float64:
            return x.astype(jax.dtypes.canonicalize_dtype(x.dtype))
        if isinstance(x, jax.Array):
            return np.asarray(x)
        return x

    if isinstance(inputs, Mapping):
        return (), {name: read(x) for name, x in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(map(read, inputs)), {}
    return (read(inputs),), {}


def _list_pairs(names: Mapping[str, str], modules: Mapping[str, Any]) -> list[_Pair]:
    """Return a pair for each name, and for one with a star a pair for each layer of theirs."""
    pairs = []
    for theirs, ours in names.items():
        if "*" not in theirs and "*" not in ours:
            pairs.append(_Pair(theirs, ours))
            continue
        if theirs.count("*") != 1 or ours.count("*") != 1:
            raise ValueError(f"{theirs!r} and {ours!r}: expected one star on both sides, for the number of a layer")
        pattern = re.compile(re.escape(theirs.removesuffix(INPUT)).replace(r"\*", r"(\d+)"))
        matches = [match for match in map(pattern.fullmatch, modules) if match]
        if not matches:
            raise ValueError(f"theirs has no module {theirs!r}; it has {', '.join(list(modules)[1:9])}")
        for row, match in enumerate(sorted(matches, key=lambda match: int(match[1]))):
            pairs.append(_Pair(theirs.replace("*", match[1]), ours, row))
    return pairs


def _run_ours(function: Callable, args: tuple, kwargs: Mapping[str, Any], names: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the result, and the named values."""
    args, kwargs = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (args, dict(kwargs)))
    with jax.default_matmul_precision("highest"):
        result, seen = eqx.filter_jit(capture(function, *names))(*args, **kwargs)
    return jax.device_get((result, seen))


def _take_row(pair: _Pair, pairs: list[_Pair], seen: Mapping[str, np.ndarray]) -> np.ndarray:
    if pair.ours not in seen:
        raise ValueError(f"{pair.ours!r} means {', '.join(seen)}: expected one value")
    value = seen[pair.ours]
    if pair.row is None:
        return value
    layers = sum(other.ours == pair.ours for other in pairs)
    if layers != len(value):
        raise ValueError(f"theirs has {layers} layers with {pair.theirs}, and ours {len(value)} of {pair.ours}")
    return value[pair.row]
