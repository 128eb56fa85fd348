"""Choose devices and build the mesh from command line options."""

import math

import jax
import numpy as np

import zoo
from zoo.parallel import AXES, Mesh


def use_cpu() -> None:
    """Use the CPU backend, for commands that only move data: no wait for an accelerator, and all of the host's memory.

    Has no effect once a device has been used.
    """
    jax.config.update("jax_platforms", "cpu")


def make_device_mesh(*, data: int, fsdp: int, tensor: int) -> Mesh | None:
    """Return a mesh over the first devices, or None for one device. One size may be -1: all remaining devices.

    **Raises** `ValueError` for more devices than available.
    """
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    if set(sizes.values()) == {1}:
        return None
    devices = jax.devices()
    if -1 in sizes.values():
        return zoo.make_mesh(data, fsdp, tensor=tensor)
    requested = _count_devices(sizes)
    if requested > len(devices):
        axes = " x ".join(f"{axis}={count}" for axis, count in sizes.items() if count > 1)
        hint = ""
        if devices[0].platform == "cpu":
            hint = f"; XLA_FLAGS=--xla_force_host_platform_device_count={requested} emulates them on the CPU"
        raise ValueError(f"{axes} needs {requested} devices, and there are {len(devices)}{hint}")
    return zoo.make_mesh(data, fsdp, tensor=tensor, devices=devices[:requested])


def make_abstract_mesh(*, data: int, fsdp: int, tensor: int) -> Mesh | None:
    """Return a mesh without real devices, enough to compute how a model would be sharded; None for one device."""
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    if _count_devices(sizes) == 1:
        return None
    shape = [sizes.get(axis, 1) for axis in AXES]
    return Mesh(jax.sharding.Mesh(np.full(shape, jax.devices("cpu")[0]), AXES), zoo.Layout())


def _count_devices(sizes: dict[str, int]) -> int:
    """Return the number of devices of a mesh. **Raises** `ValueError` for a size below 1."""
    if invalid := [f"{axis}={count}" for axis, count in sizes.items() if count < 1]:
        raise ValueError(f"the size of a mesh axis must be at least 1, not {invalid[0]}")
    return math.prod(sizes.values())
