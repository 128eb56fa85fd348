"""Comparison of every recurrence with files of reference values in float64.

`evaluate(op, mode, inputs)` takes the names and arrays of the reference files. `check_folder(folder)` checks every file
<op>.<variant>.safetensors there: in.NAME are the inputs, weight.o and weight.state cotangents (loss =
sum(o * weight.o) + sum(state * weight.state)), f64.o, f64.state and f64.grad.NAME the results in float64.

    PYTHONPATH=. python -m tests.parity_ops FOLDER
"""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from safetensors.numpy import load_file

from zoo.ops import recurrence
from zoo.ops.recurrence.mamba3 import Mamba3State

MODES = ("recurrent", "chunked")
VALUES = {"recurrent": 5e-6, "chunked": 2e-5}
"""Tolerance of values, relative to the largest; five times that for chunked `strong`."""
GRADIENTS = {"strong": 1e-3}
"""Tolerance of gradients, relative to the largest; 1e-4 by default."""


class Op(NamedTuple):
    """The module and function of an operation, and its arguments by their names in the files, in order."""

    module: str
    function: str
    inputs: str
    convert_state: Callable[[Any], Array] = lambda state: state
    """Convert the state of the function to that of the files."""
    states: str = "s0"
    """Names of the initial state in the files."""
    make_state: Callable[[list[Array], dict[str, Array]], Any] = lambda given, _: jnp.concatenate(given, axis=-1)
    """Make the initial state of the function from the given ones, and from all inputs."""
    options: Mapping[str, Any] = MappingProxyType({})


def make_mamba3_state(given: list[Array], inputs: dict[str, Array]) -> Mamba3State:
    """Return the state before a first token, in which only the matrix is not zero."""
    B, x, turns = (jnp.zeros_like(inputs[name][:, :1]) for name in ("B", "x", "angle"))
    return Mamba3State(given[0], B, x, turns[:, 0])


OPS = {
    "linear_attn": Op("linear_attention", "linear_attention", "q k v"),
    "linear_attn_norm": Op("linear_attention", "normalized_linear_attention", "q k v", lambda state: state[..., :-1]),
    "retention": Op("linear_attention", "retention", "q k v"),
    "simple_gla": Op("linear_attention", "simple_gla", "q k v g"),
    "gla": Op("linear_attention", "gla", "q k v g"),
    "delta_rule": Op("delta_rule", "delta_rule", "q k v beta"),
    "gated_delta_rule": Op("delta_rule", "gated_delta_rule", "q k v beta g"),
    "hgrn": Op("hgrn", "hgrn", "x g"),
    "rwkv4": Op("rwkv4", "rwkv4", "k v w u", lambda state: state.numerator / state.denominator),
    "rwkv6": Op("rwkv6", "rwkv6", "q k v g u"),
    "mamba1": Op("mamba", "selective_scan", "x dt A B C D"),
    "mamba2": Op("mamba2", "ssd", "x dt A B C D"),
    "mamba3": Op(
        *("mamba3", "mamba3", "x dt adt lam angle B C D"),
        lambda state: state.ssm_state,
        make_state=make_mamba3_state,
    ),
    "kda": Op("delta_rule", "kda", "q k v beta g"),
    "gated_delta_product": Op("delta_rule", "gated_delta_product", "q k v beta g"),
    "rwkv7": Op("rwkv7", "rwkv7", "q k v g a b"),
    "rg_lru": Op("rg_lru", "rg_lru", "x r i param"),
    "mlstm": Op("mlstm", "mlstm", "q k v i f", lambda state: state.sums[..., :-1]),
    "gdn2": Op("decoupled_delta", "gdn2", "q k v g b w"),
    "comba": Op("decoupled_delta", "comba", "q k v p beta g", options={"read_before_decay": False}),
    "mesa": Op("mesa_net", "mesa_net", "q k v g beta lam", states="r0 s0"),
}


def evaluate(op: str, mode: str, inputs: dict[str, Array]) -> tuple[Array, Array]:
    """Compute the output and the last state of an operation; the initial state is in the inputs, or the default."""
    module, function, names, convert_state, states, make_state, options = OPS[op]
    unknown = set(inputs) - set(names.split()) - set(states.split())
    if unknown:
        raise ValueError(f"{op} takes {names} and {states}, not {', '.join(sorted(unknown))}")
    run = getattr(getattr(recurrence, module), function)
    given = [inputs[name] for name in states.split() if name in inputs]
    state = make_state(given, inputs) if given else None
    output, state = run(*(inputs[name] for name in names.split()), state=state, implementation=mode, **options)
    return output, convert_state(state)


@functools.partial(jax.jit, static_argnums=(0, 1))
def with_gradients(op: str, mode: str, inputs: dict[str, Array], weights: dict[str, Array]) -> tuple:
    """Compute output, state and the gradients of the loss."""
    (output, state), back = jax.vjp(lambda inputs: evaluate(op, mode, inputs), inputs)
    return output, state, back((weights["o"].astype(output.dtype), weights["state"]))[0]


def distance(ours: Array, theirs: np.ndarray) -> float:
    """Return the largest difference relative to the largest value; infinite if ours is not finite."""
    found = np.asarray(ours, np.float64)
    if found.shape != theirs.shape:
        raise AssertionError(f"ours is {found.shape}, the reference {theirs.shape}")
    if not np.isfinite(found).all():
        return np.inf
    return float(np.abs(found - theirs).max() / max(np.abs(theirs).max(), 1e-30))


def distances(file: Path, mode: str) -> dict[str, float]:
    """Return the distances of the output, the state and each gradient."""
    arrays = load_file(file)
    part = lambda prefix: {key.removeprefix(prefix): x for key, x in arrays.items() if key.startswith(prefix)}
    inputs = {key: jnp.asarray(x) for key, x in part("in.").items()}
    output, state, gradients = with_gradients(file.name.split(".")[0], mode, inputs, part("weight."))
    found = {"o": distance(output, arrays["f64.o"]), "state": distance(state, arrays["f64.state"])}
    return found | {f"grad.{key}": distance(gradients[key], x) for key, x in part("f64.grad.").items()}


def tolerance(file: Path, mode: str, what: str) -> float:
    """Return the tolerance of a result."""
    variant = file.name.split(".")[1]
    if what.startswith("grad."):
        return GRADIENTS.get(variant, 1e-4)
    return VALUES[mode] * (5 if (mode, variant) == ("chunked", "strong") else 1)


def failures(file: Path, mode: str) -> list[str]:
    """Describe the results beyond their tolerance."""
    return [
        f"{file.stem} {mode}: {what} is off by {found:.1e}, and {tolerance(file, mode, what):.0e} is allowed"
        for what, found in distances(file, mode).items()
        if not found <= tolerance(file, mode, what)
    ]


def files(folder: Path) -> Iterator[Path]:
    """Yield the reference files of a folder. **Raises** `FileNotFoundError` if it has none."""
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(f"no <op>.<variant>.safetensors in {folder}")
    yield from found


def check_folder(folder: Path) -> list[str]:
    """Describe the results of all files and modes beyond their tolerance."""
    return [line for file in files(folder) for mode in MODES for line in failures(file, mode)]


if __name__ == "__main__":
    failed = check_folder(Path(sys.argv[1]))
    print("\n".join(failed) or "all agree")
    sys.exit(bool(failed))
