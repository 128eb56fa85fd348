"""Every recurrence by one call, and files of reference values to hold them against.

`evaluate(op, form, inputs)` takes the names and arrays that the reference files have. `check_folder(folder)` runs every
file <op>.<variant>.safetensors there: in.NAME are the inputs, weight.o and weight.state cotangents (loss =
sum(o * weight.o) + sum(state * weight.state)), f64.o, f64.state and f64.grad.NAME what float64 gives.

    PYTHONPATH=. python -m tests.parity_ops FOLDER
"""

import functools
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from safetensors.numpy import load_file

FORMS = ("recurrent", "chunked")
VALUES = {"recurrent": 5e-6, "chunked": 2e-5}
"""How far values may be from those in float64, in parts of the largest; five times as far for `strong`, chunked."""
GRADIENTS = {"strong": 1e-3}
"""How far gradients may be, likewise; 1e-4 where nothing is said."""


class Op(NamedTuple):
    """Where an operation is, and its arguments by the names in the files, in order."""

    module: str
    function: str
    inputs: str
    of_state: Callable[[Any], Array] = lambda state: state
    """The state that the files have, of the one that the function gives."""


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
    "kda": Op("delta_rule", "kda", "q k v beta g"),
    "gated_delta_product": Op("delta_rule", "gated_delta_product", "q k v beta g"),
    "rwkv7": Op("rwkv7", "rwkv7", "q k v g a b"),
    "rg_lru": Op("rg_lru", "rg_lru", "x r i param"),
    "mlstm": Op("mlstm", "mlstm", "q k v i f", lambda state: state.sums[..., :-1]),
}


def evaluate(op: str, form: str, inputs: dict[str, Array]) -> tuple[Array, Array]:
    """The output and the last state of an operation; the first state is `s0`, or what there is without one."""
    module, function, names, of_state = OPS[op]
    unknown = set(inputs) - set(names.split()) - {"s0"}
    if unknown:
        raise ValueError(f"{op} takes {names} and s0, not {', '.join(sorted(unknown))}")
    run = getattr(import_module(f"zoo.ops.recurrence.{module}"), function)
    output, state = run(*(inputs[name] for name in names.split()), state=inputs.get("s0"), mode=form)
    return output, of_state(state)


@functools.partial(jax.jit, static_argnums=(0, 1))
def with_gradients(op: str, form: str, inputs: dict[str, Array], weights: dict[str, Array]) -> tuple:
    """Output, state and the loss's gradients."""
    (output, state), back = jax.vjp(lambda inputs: evaluate(op, form, inputs), inputs)
    return output, state, back((weights["o"].astype(output.dtype), weights["state"]))[0]


def distance(ours: Array, theirs: np.ndarray) -> float:
    """The largest difference, in parts of the largest value; infinite where ours is not finite."""
    found = np.asarray(ours, np.float64)
    if found.shape != theirs.shape:
        raise AssertionError(f"ours is {found.shape}, the reference {theirs.shape}")
    if not np.isfinite(found).all():
        return np.inf
    return float(np.abs(found - theirs).max() / max(np.abs(theirs).max(), 1e-30))


def distances(file: Path, form: str) -> dict[str, float]:
    """Of the output, the state and each gradient."""
    arrays = load_file(file)
    part = lambda prefix: {key.removeprefix(prefix): x for key, x in arrays.items() if key.startswith(prefix)}
    inputs = {key: jnp.asarray(x) for key, x in part("in.").items()}
    output, state, gradients = with_gradients(file.name.split(".")[0], form, inputs, part("weight."))
    found = {"o": distance(output, arrays["f64.o"]), "state": distance(state, arrays["f64.state"])}
    return found | {f"grad.{key}": distance(gradients[key], x) for key, x in part("f64.grad.").items()}


def tolerance(file: Path, form: str, what: str) -> float:
    """How far a result may be from the reference."""
    variant = file.name.split(".")[1]
    if what.startswith("grad."):
        return GRADIENTS.get(variant, 1e-4)
    return VALUES[form] * (5 if (form, variant) == ("chunked", "strong") else 1)


def failures(file: Path, form: str) -> list[str]:
    """What is too far off, in words."""
    return [
        f"{file.stem} {form}: {what} is off by {found:.1e}, and {tolerance(file, form, what):.0e} is allowed"
        for what, found in distances(file, form).items()
        if not found <= tolerance(file, form, what)
    ]


def files(folder: Path) -> Iterator[Path]:
    """The reference files of a folder. **Raises** `FileNotFoundError` where there are none."""
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(f"no <op>.<variant>.safetensors in {folder}")
    yield from found


def check_folder(folder: Path) -> list[str]:
    """What of all files and both forms is too far off: nothing, where all is well."""
    return [line for file in files(folder) for form in FORMS for line in failures(file, form)]


if __name__ == "__main__":
    wrong = check_folder(Path(sys.argv[1]))
    print("\n".join(wrong) or "all agree")
    sys.exit(bool(wrong))
