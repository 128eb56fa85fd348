"""Lower a jitted step, from arrays or from `jax.ShapeDtypeStruct`s, whose shardings determine the devices."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.extend.core
from jax.sharding import Mesh

from zoo.ops.platform import (
    Platform,
    normalize_platform,
    stand_in_platform,
    target_device,
    target_platform,
)
from zoo.parallel.imagined import is_imagined


def has_shapes(leaves: Sequence[Any]) -> bool:
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)


def trace(
    step: Callable, args: tuple, kwargs: dict, leaves: Sequence[Any], platform: Platform | None = None
) -> tuple[Any, Any]:
    """Return the jaxpr of a call of a jitted step, and its only equation, the jitted function's. `leaves` are the
    arrays and shapes of the arguments; their devices may stand in for devices of `platform`. **Raises** `TypeError` if
    there is another equation."""
    chosen = platform or _choose_platform(leaves)
    with target_platform(chosen), stand_in_platform(platform), target_device(_find_imagined(leaves)):
        closed = eqx.filter_make_jaxpr(step)(*args, **kwargs)[0]
    calls = [equation for equation in closed.jaxpr.eqns if "donated_invars" in equation.params]
    if len(calls) != 1:
        raise TypeError(
            f"{get_step_name(step)} is not one jitted function: pass the result of eqx.filter_jit or jax.jit"
        )
    return closed, calls[0]


def lower(step: Any, closed: Any, call: Any, args: tuple, kwargs: dict, leaves: Sequence[Any]) -> Any:
    """Lower a step. `closed` and `call` come from `trace`. From shapes the traced call is lowered, since the `lower` of
    `eqx.filter_jit` takes shapes for constants."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")  # the report has them
        if not has_shapes(leaves):
            return step.lower(*args, **kwargs)
        known = dict(zip(map(id, closed.jaxpr.invars + closed.jaxpr.constvars), [*leaves, *closed.consts], strict=True))
        arguments = [known.get(id(variable), variable.aval) for variable in call.invars]  # a number has no variable

        jaxpr = call.params["jaxpr"]
        paths = jaxpr.jaxpr.debug_info.result_paths or ()

        def run(*arrays):
            return _NamedResults(jax.extend.core.jaxpr_as_fun(jaxpr)(*arrays), paths)

        run.__name__ = get_step_name(step)
        donated = tuple(index for index, is_donated in enumerate(call.params["donated_invars"]) if is_donated)
        with target_platform(_choose_platform(leaves)), target_device(_find_imagined(leaves)):
            return jax.jit(run, donate_argnums=donated, keep_unused=call.params["keep_unused"]).lower(*arguments)


@jax.tree_util.register_pytree_with_keys_class
class _NamedResults:
    """Results of a traced call, with the paths that they have in the result of its function. JAX writes the paths into
    the program. With them, the compilation cache finds the same program as for the call itself."""

    def __init__(self, arrays: Sequence[Any], paths: Sequence[str]):
        self.arrays = arrays
        self.paths = paths

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        names = [path.removeprefix("result") for path in self.paths] or range(len(self.arrays))
        return list(zip(map(_Path, names), self.arrays, strict=True)), self.paths

    @classmethod
    def tree_unflatten(cls, paths: Any, arrays: Any) -> "_NamedResults":
        return cls(arrays, paths)


class _Path(str):
    """A key of a pytree that is printed as it stands."""


def choose_compiler_options(leaves: Sequence[Any]) -> dict[str, Any]:
    """Return the options to compile a step with: none, but for GPUs that this machine does not have. There autotuning
    is off, since nothing can be timed."""
    device = _find_imagined(leaves)
    if device is not None and device.platform == "gpu":
        return {"xla_gpu_autotune_level": 0}
    return {}


def get_step_name(step: Any) -> str:
    return getattr(step, "__name__", type(step).__name__)


def list_devices(mesh: Mesh | None, leaves: Sequence[Any]) -> list[Any]:
    """List the devices that a step with this mesh and these arguments is compiled for, in the order of the program's
    device numbers."""
    if mesh is not None:
        return list(mesh.devices.flat)
    return _find_devices(leaves) or jax.devices()[:1]


def _find_devices(leaves: Sequence[Any]) -> list[Any]:
    """Return the devices of the first shape that has a sharding, otherwise of the first array: next to shapes for other
    devices there may be a key on this machine."""
    first = sorted(leaves, key=lambda x: not isinstance(x, jax.ShapeDtypeStruct))
    shardings = [x.sharding for x in first if isinstance(getattr(x, "sharding", None), jax.sharding.Sharding)]
    return [device for sharding in shardings[:1] for device in sharding._device_assignment]


def _find_imagined(leaves: Sequence[Any]) -> Any:
    """Return the first device of the shapes if this machine does not have it, else None."""
    devices = _find_devices(leaves)
    if devices and is_imagined(devices[0]):
        return devices[0]
    return None


def _choose_platform(leaves: Sequence[Any]) -> str | None:
    """Return the platform to trace for: the platform of the shapes' devices. For arrays it is the same as in a call, so
    that a call finds the program that was compiled for them."""
    if has_shapes(leaves) and (devices := _find_devices(leaves)):
        return normalize_platform(devices[0].platform)
    return target_platform.value
