"""Choose devices and build the mesh from command line options."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from .layout import Layout
from .mesh import Mesh, make_mesh


def use_cpu() -> None:
    """Use the CPU backend, for commands that only move data: no wait for an accelerator, and all of the host's memory.

    Has no effect once a device has been used.
    """
    jax.config.update("jax_platforms", "cpu")


def make_device_mesh(**sizes: int) -> Mesh | None:
    """Return a mesh of these sizes, by axis, over the first devices; None for one device. One size may be -1: all
    remaining devices.

    **Raises** `ValueError` for more devices than available.
    """
    if set(sizes.values()) == {1}:
        return None
    if -1 in sizes.values():
        return _make_mesh(sizes, jax.devices())
    devices = jax.devices()
    requested = _count_devices(sizes)
    if requested > len(devices):
        axes = " x ".join(f"{axis}={count}" for axis, count in sizes.items() if count > 1)
        hint = ""
        if devices[0].platform == "cpu":
            hint = f"; XLA_FLAGS=--xla_force_host_platform_device_count={requested} emulates them on the CPU"
        raise ValueError(f"{axes} needs {requested} devices, and there are {len(devices)}{hint}")
    return _make_mesh(sizes, devices[:requested])


def make_abstract_mesh(layout: Layout | None = None, **sizes: int) -> Mesh | None:
    """Return a mesh without real devices, enough to compute how a model would be sharded; None for one device."""
    if (count := _count_devices(sizes)) == 1:
        return None
    return _make_mesh(sizes, jax.devices("cpu")[:1] * count, layout)


def _make_mesh(sizes: dict[str, int], devices: Sequence[Any], layout: Layout | None = None) -> Mesh:
    options: dict[str, Any] = {"devices": devices, "layout": layout}
    return make_mesh(**sizes, **options)


def _count_devices(sizes: dict[str, int]) -> int:
    """Return the number of devices of a mesh. **Raises** `ValueError` for a size below 1."""
    if invalid := [f"{axis}={count}" for axis, count in sizes.items() if count < 1]:
        raise ValueError(f"the size of a mesh axis must be at least 1, not {invalid[0]}")
    return math.prod(sizes.values())
