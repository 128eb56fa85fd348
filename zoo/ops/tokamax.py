"""Calls of tokamax, OpenXLA's library of kernels for GPUs and TPUs (https://github.com/openxla/tokamax).

On GPUs and TPUs its Pallas kernels run, on CPUs what it computes by XLA only. It is imported when the first of its
kernels is traced.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import backend
from jax.sharding import AxisType

from .implementations import ObstacleError, find_kernel_obstacle
from .platform import Platform, current_platform, normalize_platform, target_device
from .unchecked import call_kernel

UNMEASURED = "it has been measured on few devices, so only its name chooses it"
"""The drawback of all kernels of tokamax: why `"auto"` passes them over."""


def find_tokamax_obstacle(*platforms: Platform) -> str | None:
    """Return why tokamax cannot be called: on this platform, in an exported program, or because it is missing."""
    if reason := find_kernel_obstacle(*platforms):
        return reason
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax cannot be found: pip install 'equizoo[tokamax]', with Python 3.12 and jax 0.11.1 or newer"
    platform = current_platform()
    if platform not in ("cpu", normalize_platform(jax.default_backend())) and target_device.value is None:
        return (
            f"it asks for the model of the {platform.upper()}, and this machine has none: compile for a mesh of "
            "zoo.parallel.imagined devices"
        )
    return None


def call_tokamax(function: Callable, operands: tuple, *others: Any, operation: str, instead: str) -> Any:
    """Return `function(tokamax, *operands, *others)`, as `call_kernel` does.

    `operation` and `instead` are for errors: what is computed, and what to set where tokamax cannot.

    **Raises** `ObstacleError`, a `ValueError`, with the reason for which tokamax refuses to compute this.
    """

    def run(*arrays: Any) -> Any:
        return function(importlib.import_module("tokamax"), *arrays)

    refused = f"tokamax's {operation}", instead
    return call_kernel(run, operands, *others, refused=refused, within=lambda: _describe_target(*refused))


def find_capability() -> float:
    """Return the CUDA compute capability that is compiled for: 9.0 for an H100, 10.0 for a B200, 0 without a GPU."""
    device = target_device.value or backend.get_default_device()
    return float(getattr(device, "compute_capability", 0))


def find_device_kind() -> str:
    """Return JAX's name of the device that is compiled for: "TPU v5" for a v5p, "TPU v6 lite" for a v6e."""
    device = target_device.value or backend.get_default_device()
    return device.device_kind


@contextlib.contextmanager
def _describe_target(operation: str, instead: str) -> Iterator[None]:
    """Tell tokamax which device it compiles for, if this machine does not have it: it asks the default device and the
    abstract mesh. Its refusals become errors that name the operation."""
    device = target_device.value
    with contextlib.ExitStack() as stack:
        if device is not None:
            stack.enter_context(importlib.import_module("tokamax").config.cross_compile(True))
            if device.platform == "gpu":
                stack.enter_context(jax.default_device(device))
            if jax.sharding.get_abstract_mesh().empty:
                mesh = jax.make_mesh((1,), ("target",), axis_types=(AxisType.Auto,), devices=[device])
                stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
        try:
            yield
        except NotImplementedError as error:
            message = f"{operation} cannot compute this, because it says {str(error)!r}: {instead}"
            raise ObstacleError(message) from error
