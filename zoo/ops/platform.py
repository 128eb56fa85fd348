"""The platform that a program is compiled for, which the choice of implementations depends on.

It is not always JAX's default backend: a program may be compiled for devices that this machine does not have, or run on
a mesh of CPU devices next to a GPU.
"""

from typing import Literal, cast

import jax

Platform = Literal["cpu", "gpu", "tpu"]

target_platform = jax.make_user_context(None)
"""Context manager, `with target_platform("tpu"):`, that sets the platform of the functions traced inside. It is part of
JAX's trace cache key."""

_NAMES = {"cuda": "gpu", "rocm": "gpu"}


stand_in_platform = jax.make_user_context(None)
"""Context manager that sets the platform for which the devices of meshes stand in, while a step is traced in shapes."""


target_device = jax.make_user_context(None)
"""Context manager that sets the device of the functions traced inside, for devices that this machine does not have. A
kernel of another library asks which GPU or TPU it is compiled for."""


for_export = jax.make_user_context(False)
"""Context manager, `with for_export(True):`, to trace programs that are written to files. They run elsewhere and later,
so kernels of other libraries than XLA have an obstacle."""


def current_platform() -> Platform:
    """Return the platform to compile for: the mesh's inside `zoo.spmd`, otherwise JAX's default backend."""
    return normalize_platform(target_platform.value or jax.default_backend())


def normalize_platform(name: str) -> Platform:
    """Return the platform of a device: a GPU of a topology says "cuda", a real one "gpu"."""
    return cast(Platform, _NAMES.get(name, name))
