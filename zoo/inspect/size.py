"""Memory of a model's arrays, and bits per parameter."""

import dataclasses
import math
from typing import Any

import jax
from jaxtyping import PyTree

from zoo.layers.quantized.packed import AbstractPackedLinear


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Result of `measure_size`."""

    num_parameters: int
    """Number of parameters; a quantized matrix counts the elements of the decoded matrix."""
    bytes: int
    """Bytes of all arrays, counted once for all devices that hold a copy."""

    @property
    def bits_per_parameter(self) -> float:
        """Average number of bits per parameter."""
        return 8 * self.bytes / self.num_parameters


def measure_size(model: PyTree) -> ModelSize:
    """Count the parameters and bytes of a model, or of a model of `jax.ShapeDtypeStruct`s.

    All floating-point numbers are parameters, trainable or frozen. Quantized matrices count decoded; other integers
    count only as bytes.
    """
    nodes = jax.tree.leaves(model, is_leaf=_is_packed)
    packed = [node for node in nodes if _is_packed(node)]
    arrays = [x for x in nodes if hasattr(x, "dtype")] + [node.bias for node in packed if node.bias is not None]
    parameters = sum(x.size for x in arrays if jax.numpy.issubdtype(x.dtype, jax.numpy.floating))
    parameters += count_packed(model)
    return ModelSize(parameters, sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(model) if hasattr(x, "dtype")))


def count_packed(model: PyTree) -> int:
    """Count the elements of the matrices of quantized layers, decoded."""
    packed = filter(_is_packed, jax.tree.leaves(model, is_leaf=_is_packed))
    decoded = [jax.eval_shape(node.decode, *node.packed_arrays, *node.shared_arrays) for node in packed]
    return sum(math.prod(matrix.shape) for matrix in decoded)


def _is_packed(node: Any) -> bool:
    return isinstance(node, AbstractPackedLinear)
