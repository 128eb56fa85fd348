"""Compile for devices that are not here: `compile_for`, for tests marked `aot`.

    @pytest.mark.aot
    def test_kernel_compiles_for_tpu():
        program = compile_for("v5e:2x4", kernel, jax.ShapeDtypeStruct((2, 256, 4, 64), "bfloat16"))
        assert "tpu_custom_call" in program.text and program.memory.temporaries < 10**6

Without the compilers of the extras `aot-tpu` and `aot-cuda` such a test is skipped.
"""

from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import SingleDeviceSharding

import zoo
from zoo._optional import MissingExtraError
from zoo.inspect.program import CompiledProgram
from zoo.parallel.mesh import is_array_or_shape


def imagine(topology: str) -> list[Any]:
    """Return `zoo.parallel.imagined(topology)`; skip the test if its compiler is not installed."""
    try:
        return zoo.parallel.imagined(topology)
    except MissingExtraError as error:
        pytest.skip(str(error))


def compile_for(topology: str, fn: Callable, *args: Any) -> CompiledProgram:
    """Compile `fn(*args)` for a topology. Arrays and shapes without a sharding over a mesh are for its first device;
    make those over a mesh by `zoo.place(shapes, mesh)`, with `zoo.make_mesh(devices=imagine(topology))`."""
    device = SingleDeviceSharding(imagine(topology)[0])

    def put(x):
        if not is_array_or_shape(x) or isinstance(x.sharding, jax.sharding.NamedSharding):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device)

    return zoo.inspect.compiled(fn, *jax.tree.map(put, args))
