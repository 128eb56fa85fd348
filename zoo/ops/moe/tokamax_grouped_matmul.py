"""Grouped matrix products by `tokamax.ragged_dot`: Pallas kernels on TPUs and NVIDIA GPUs.

The kernels take one [in, out] matrix per group, so ours are transposed before, which reads and writes each once more.
They leave rows beyond all groups unwritten, in the product and in the gradient of the rows: `_call_ragged_dot` zeros
these.
"""

import functools
from types import ModuleType

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..platform import current_platform
from ..tokamax import call_tokamax, find_tokamax_obstacle

_SMALLEST = 128
"""Rows and features of the smallest block of a TPU kernel."""
_INSTEAD = 'set grouped_matmul="padded", or "masked", as zoo.twice_differentiable(model) does'


def grouped_matmul_tokamax(
    x: Float[Array, "rows in"], weight: Float[Array, "experts out in"], group_sizes: Int[Array, "experts"]
) -> Float[Array, "rows out"]:
    """Compute the grouped product by tokamax: by Pallas kernels on TPUs and NVIDIA GPUs, by XLA on CPUs.

    **Raises** `ValueError` with tokamax's reason: its kernel for Blackwell has no gradient.
    """
    name = "xla" if current_platform() == "cpu" else "mosaic"
    multiply = functools.partial(_call_ragged_dot, name)
    return call_tokamax(multiply, (x, weight), group_sizes, operation="grouped matmul", instead=_INSTEAD)


def find_tokamax_grouped_obstacle(rows: int, in_size: int, out_size: int, dtype: jnp.dtype) -> str | None:
    """Return why `grouped_matmul_tokamax` cannot multiply operands of these sizes, or None."""
    if reason := find_tokamax_obstacle("cpu", "gpu", "tpu"):
        return reason
    platform = current_platform()
    dtypes = (jnp.bfloat16, jnp.float16) if platform == "gpu" else (jnp.float32, jnp.bfloat16)
    if dtype not in dtypes:
        names = " or ".join(jnp.dtype(each).name for each in dtypes)
        return f"it computes in {names} on {platform.upper()}s, not in {jnp.dtype(dtype).name}"
    if platform == "tpu" and min(rows, in_size, out_size) < _SMALLEST:
        return f"it takes rows and features from {_SMALLEST} on, and there are {rows}, {in_size} and {out_size}"
    return None


def _call_ragged_dot(name: str, tokamax: ModuleType, x: Array, weight: Array, group_sizes: Array) -> Array:
    is_real = (jnp.arange(len(x)) < group_sizes.sum())[:, None]
    rows = jnp.where(is_real, x, 0)
    y = tokamax.ragged_dot(
        rows, weight.swapaxes(1, 2), group_sizes, preferred_element_type=x.dtype, implementation=name
    )
    return jnp.where(is_real, y, 0)
