"""How much memory a model's arrays take, and how many bits that is for each of its numbers."""

import dataclasses
import math
from typing import Any

import jax
from jaxtyping import PyTree

from zoo.layers import AbstractPackedLinear


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """What `size` found."""

    num_parameters: int
    """Of a matrix that is packed as many as it stands for."""
    bytes: int
    """Of all arrays, once, on however many devices they lie."""

    @property
    def bits_per_parameter(self) -> float:
        """Bits a number."""
        return 8 * self.bytes / self.num_parameters


def measure_size(model: PyTree) -> ModelSize:
    """Numbers and bytes of a model, or of its shapes alone. Learnt or not, all floating numbers are counted; what is
    packed counts decoded, and integers beside it take bytes only."""
    nodes = jax.tree.leaves(model, is_leaf=_is_packed)
    packed = [node for node in nodes if _is_packed(node)]
    arrays = [x for x in nodes if hasattr(x, "dtype")] + [node.bias for node in packed if node.bias is not None]
    numbers = sum(x.size for x in arrays if jax.numpy.issubdtype(x.dtype, jax.numpy.floating))
    numbers += sum(math.prod(jax.eval_shape(node.decode, *node.packed_arrays).shape) for node in packed)
    return ModelSize(numbers, sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(model) if hasattr(x, "dtype")))


def _is_packed(node: Any) -> bool:
    return isinstance(node, AbstractPackedLinear)
