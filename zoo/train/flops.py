"""FLOPs of a training step, and of the devices, for the speed that a run shows."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PyTree

from zoo.adapters import adapter_names
from zoo.inspect import lowering
from zoo.inspect.operations import count_flops
from zoo.models import Decoder
from zoo.parallel.chips import find_chip


def count_step_flops(model: Any, tokens: Any) -> int:
    """Count the FLOPs of the matrix products that a training step takes: three times the forward pass of `tokens`,
    "batch seq". What is computed again in the backward pass does not count.

    Both may be `jax.ShapeDtypeStruct`s. Returns 0 where the number is not known: for a model that is not a `Decoder`,
    for one with adapters, which takes no gradient of its base, for products in kernels, and for a model that names an
    implementation which CPUs do not have, since products are counted as a CPU computes them.
    """
    if not isinstance(model, Decoder) or adapter_names(model):
        return 0
    model, tokens = to_shapes((model, tokens))  # without the mesh: numbers of one device
    step = eqx.filter_jit(_compute_logits)
    shapes = [x for x in jax.tree.leaves((model, tokens)) if isinstance(x, jax.ShapeDtypeStruct)]
    try:
        jaxpr, _ = lowering.trace(step, (model, tokens), {}, shapes, "cpu")
    except (ValueError, NotImplementedError):
        return 0
    flops = count_flops(jaxpr)
    if flops.uncounted:
        return 0
    return 3 * flops.total


def _compute_logits(model: Decoder, tokens: Any) -> Any:
    return model(tokens)


def find_peak_flops(devices: Sequence[Any]) -> float:
    """Return the FLOPs per second of all devices in bfloat16 by their data sheet, which MFU is a share of whatever the
    dtype of the run; 0 for CPUs and other devices that are not in `zoo.parallel.chips.CHIPS`."""
    chip = find_chip(devices[0])
    if chip is None:
        return 0.0
    return len(devices) * chip.rate("bfloat16")


def to_shapes(tree: PyTree) -> PyTree:
    """Return a tree with a `jax.ShapeDtypeStruct`, without a sharding, in place of each array."""

    def to_shape(x: Any) -> Any:
        if eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x

    return jax.tree.map(to_shape, tree)
