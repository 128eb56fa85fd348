"""Meshes as they are asked for on the command line."""

import math

import jax
import numpy as np

import zoo
from zoo.parallel import AXES, Mesh


def use_cpu() -> None:
    """Compute on the CPU, whatever else the machine has: a command that only moves numbers then waits for no
    accelerator to start, and may use all of the host's memory. No effect once a device was used."""
    jax.config.update("jax_platforms", "cpu")


def make_device_mesh(*, data: int, fsdp: int, tensor: int) -> Mesh | None:
    """A mesh over the first devices that there are, None for one device. One size may be -1: all that remain.

    **Raises** `ValueError` for more devices than there are.
    """
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    if set(sizes.values()) == {1}:
        return None
    devices = jax.devices()
    if -1 in sizes.values():
        return zoo.make_mesh(data, fsdp, tensor=tensor)
    asked = _count_devices(sizes)
    if asked > len(devices):
        told = " x ".join(f"{axis}={count}" for axis, count in sizes.items() if count > 1)
        hint = ""
        if devices[0].platform == "cpu":
            hint = f"; XLA_FLAGS=--xla_force_host_platform_device_count={asked} makes that many of a CPU"
        raise ValueError(f"{told} asks for {asked} devices, and there are {len(devices)}{hint}")
    return zoo.make_mesh(data, fsdp, tensor=tensor, devices=devices[:asked])


def make_abstract_mesh(*, data: int, fsdp: int, tensor: int) -> Mesh | None:
    """The same without the devices: enough to ask how a model would lie on them, not to put it there."""
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    if _count_devices(sizes) == 1:
        return None
    shape = [sizes.get(axis, 1) for axis in AXES]
    return Mesh(jax.sharding.Mesh(np.full(shape, jax.devices("cpu")[0]), AXES), zoo.Layout())


def _count_devices(sizes: dict[str, int]) -> int:
    """How many devices these are. **Raises** `ValueError` for a size below 1."""
    if bad := [f"{axis}={count}" for axis, count in sizes.items() if count < 1]:
        raise ValueError(f"a mesh axis has a size of at least 1, not {bad[0]}")
    return math.prod(sizes.values())
