"""Run a PyTorch module, or any function of arrays, and read values of its submodules by forward hooks.

Whoever made the module has imported torch. Of a module only `named_modules` and hooks are used: tests have
stand-ins.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from zoo.models.hf.errors import suggest_nearest

INPUT = ".input"
"""Ending of the name of a module's input, as in `zoo.capture`."""


class Hooked(NamedTuple):
    """Result of a module, and values of its submodules in the order of the forward pass."""

    result: Any
    values: dict[str, np.ndarray]
    notes: tuple[str, ...]


def run_hooked(function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], names: Iterable[str]) -> Hooked:
    """Call `function`, and keep a copy of the named values: a submodule's result, or with `.input` its input.

    A PyTorch module gets tensors on its device, and runs without gradients; any other function gets NumPy arrays.

    **Raises** `ValueError` for an unknown name, for a submodule that runs several times or not at all, and for a
    function that draws random numbers.
    """
    values: dict[str, list[np.ndarray]] = {}
    modules = list_modules(function)
    handles = []
    try:
        for name in names:
            handles.append(_add_hook(name, modules, values))
        before = _read_random_states()
        result = _call(function, args, kwargs)
    finally:
        for handle in handles:
            handle.remove()
    if not all(map(np.array_equal, before, _read_random_states())):
        raise ValueError(
            "theirs drew random numbers, as dropout does in train mode: call theirs.eval(), or set its dropout to 0"
        )
    for name in names:
        if len(values.get(name, ())) != 1:
            runs = f"runs {len(values[name])} times" if name in values else "does not run"
            raise ValueError(f"{name} of theirs {runs}, expected one value: name another module")
    notes = ()
    if getattr(function, "training", False):
        notes = ("theirs ran in train mode",)
    return Hooked(result, {name: found for name, (found,) in values.items()}, notes)


def list_modules(function: Any) -> dict[str, Any]:
    """Return the submodules of a module by name; {} of a function."""
    if hasattr(function, "named_modules"):
        return dict(function.named_modules())
    return {}


def to_numpy(x: Any) -> np.ndarray:
    """Copy a tensor or an array. A tensor in bfloat16, which NumPy lacks, becomes float32."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        if "bfloat16" in str(x.dtype):
            x = x.float()
        x = x.numpy()
    return np.array(x)


def _add_hook(name: str, modules: Mapping[str, Any], values: dict[str, list[np.ndarray]]) -> Any:
    """Keep each value of this name. Returns the handle that removes the hook."""

    def keep(value: Any) -> None:
        values.setdefault(name, []).append(to_numpy(_take_first(name, value)))

    if name in modules:
        return modules[name].register_forward_hook(lambda module, args, output: keep(output))
    if name.removesuffix(INPUT) in modules:
        module = modules[name.removesuffix(INPUT)]
        return module.register_forward_pre_hook(
            lambda module, args, kwargs: keep((*args, *kwargs.values())), with_kwargs=True
        )
    if not modules:
        raise ValueError(f"there is no {name} to name in a function: pass theirs as a module, or leave names out")
    raise ValueError(f"theirs has no module {name!r}{suggest_nearest(name, modules)}")


def _take_first(name: str, value: Any) -> Any:
    """Return the first of several results, as `zoo.capture` does."""
    while isinstance(value, tuple | list | Mapping) and len(value):
        parts = value.values() if isinstance(value, Mapping) else value
        value = next(iter(parts))
    if not hasattr(value, "shape"):
        raise ValueError(f"{name} of theirs is {type(value).__name__}, expected a tensor: name another module")
    return value


def _call(function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    owner = getattr(function, "__self__", function)  # of a bound method, such as theirs.encode
    if not any(base.__module__.partition(".")[0] == "torch" for base in type(owner).__mro__):
        return function(*args, **kwargs)
    import torch  # pyright: ignore[reportMissingImports]

    device = next((parameter.device for parameter in owner.parameters()), torch.device("cpu"))

    def to_torch(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        if x.dtype.name == "bfloat16":  # torch reads no NumPy arrays of this dtype
            return torch.tensor(x.view(np.int16)).view(torch.bfloat16).to(device)
        return torch.tensor(x).to(device)

    with torch.no_grad():
        return function(*map(to_torch, args), **{name: to_torch(x) for name, x in kwargs.items()})


def _read_random_states() -> list[np.ndarray]:
    """Return the states of torch's random number generators, on the CPU and on each GPU in use; [] without torch."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return []
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return [state.numpy() for state in states]
