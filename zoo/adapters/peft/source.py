"""The tensors of one adapter in PEFT's format, read by module: the rows of a fused module, or the rank of an expert."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from zoo.models.hf.spec import TensorMapping
from zoo.weights.safetensors import DTYPES, CheckpointError, LazyTensor

from ..names import PeftModule

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."

_FLOAT_DTYPES = {DTYPES[code]: code for code in ("F64", "F32", "F16", "BF16")}


def read_floats(tensor: LazyTensor, name: str, path: str) -> np.ndarray:
    """Read a tensor of an adapter. **Raises** `CheckpointError` unless it has finite floating-point numbers."""
    if tensor.dtype not in _FLOAT_DTYPES:
        raise CheckpointError(
            f"{path}: {name} is of {tensor.dtype}, expected floating-point numbers: {', '.join(_FLOAT_DTYPES.values())}"
        )
    array = np.asarray(tensor.read())
    if not np.isfinite(array).all():
        raise CheckpointError(f"{path}: {name} has a number that is not finite")
    return array


class AdapterSource:
    """The config and tensors of one adapter, and which tensors have been read.

    All experts whose matrices are one parameter have one LoRA in the file: A of shape [experts rank, in], with an
    expert's ranks together, and B of shape [out, rank experts], with a rank's experts together.
    """

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, LazyTensor], path: str, adapter_name: str, dropout: float
    ):
        self.config = config
        self.tensors = tensors
        self.path = path
        self.adapter_name = adapter_name
        self.dropout = dropout
        self.names_read: set[str] = set()

    def read_tensor(self, module: PeftModule, suffix: str, *, has_rows: bool = False) -> np.ndarray | None:
        """Read a tensor of a module, of one expert, or with `has_rows` the rows of one part of a fused module; None if
        missing."""
        name = f"{PREFIX}{module.peft_name}.{suffix}"
        if name not in self.tensors:
            return None
        if name in self.names_read:  # by another part or expert: its numbers are checked already
            array = np.asarray(self.tensors[name].read())
        else:
            array = read_floats(self.tensors[name], name, self.path)
        self.names_read.add(name)
        if module.holds_experts:
            array = self._select_expert(module, name, array, has_rows=has_rows)
        if not has_rows or module.mapping.keeps_rows:
            return array
        if array.ndim == 0 or len(array) != sum(module.part_sizes):
            raise CheckpointError(
                f"{self.path}: {name} has the shape {list(array.shape)}, and its parts {sum(module.part_sizes)} rows"
            )
        mapping = TensorMapping(module.mapping.parts, module.mapping.groups, runs=module.mapping.runs)
        shapes = [(size, *array.shape[1:]) for size in module.part_sizes]
        return mapping.views(array, shapes, 0)[module.part].reshape(shapes[module.part])

    def _select_expert(self, module: PeftModule, name: str, array: np.ndarray, *, has_rows: bool) -> np.ndarray:
        """Return one expert's A of shape [rank, in], or with `has_rows` its B of shape [out, rank]."""
        experts = module.num_experts
        expert = module.index[-1]
        rank_dim = 1 if has_rows else 0
        if array.ndim != 2 or array.shape[rank_dim] % experts:
            raise CheckpointError(
                f"{self.path}: {name} has the shape {list(array.shape)}, which does not fit {experts} experts"
            )
        if has_rows:
            return array.reshape(len(array), -1, experts)[:, :, expert]
        return array.reshape(experts, -1, array.shape[1])[expert]
