"""NVFP4 of compressed-tensors: blocks of 16 inputs with a scale in E4M3, and one number for the matrix.

    W[o, i] = weight_packed[o, i] (weight_scale[o, i // 16] (1 / weight_global_scale))

`weight_packed` (out, in / 2), uint8, holds two numbers in E2M1, the earlier input in the low nibble.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from zoo.layers.quantized.groups import NVFP4Linear
from zoo.ops.quantized.groups import CodeKind
from zoo.ops.quantized.nvfp4 import BLOCK_SIZE, E2M1, E4M3
from zoo.parallel import Dim

from ..safetensors import CheckpointError, LazyTensor
from .base import AbstractQuantizedFormat, Parts, count_groups, take_rows


@dataclasses.dataclass(frozen=True)
class NVFP4Format(AbstractQuantizedFormat):
    """compressed-tensors of the format nvfp4-pack-quantized."""

    name: ClassVar[str] = "compressed-tensors nvfp4-pack-quantized"
    suffixes: ClassVar[Mapping[str, Collection[Any]]] = {
        "weight_packed": (np.uint8,),
        "weight_scale": (E4M3,),
        "weight_global_scale": (np.float32,),
    }
    side_suffixes: ClassVar[tuple[str, ...]] = ("input_global_scale",)
    kind: ClassVar[CodeKind] = "float4_e2m1fn"
    input_group: ClassVar[int | None] = BLOCK_SIZE
    scale_field: ClassVar[str] = "constants"

    def find_shape(self, parts: Parts) -> tuple[int, int]:
        out, in_codes = parts["weight_packed"].shape
        return out, 2 * in_codes

    def list_shapes(self, out: int, in_: int, parts: Parts) -> Mapping[str, Collection[tuple[int, ...]]]:
        return {"weight_scale": [(out, count_groups(in_, BLOCK_SIZE))], "weight_global_scale": [(1,)]}

    def read_codes(self, parts: Parts, rows: np.ndarray, columns: slice) -> np.ndarray:
        numbers = np.arange(columns.start, columns.stop)
        packed = take_rows(parts["weight_packed"].read(), rows)[:, numbers // 2]
        return np.where(numbers % 2 == 0, packed & 15, packed >> 4)

    def read_scales(self, parts: Parts, rows: np.ndarray) -> np.ndarray:
        """Return the bytes of the scales. **Raises** `CheckpointError` for NaN."""
        constants = take_rows(parts["weight_scale"].read(), rows).view(np.uint8)
        if ((constants & 127) == 127).any():
            raise CheckpointError(f"a weight_scale of {self.name} is not a number")
        return constants

    def read_groups(self, name: str, parts: Parts, columns: slice) -> np.ndarray:
        return np.arange(columns.start, columns.stop) // BLOCK_SIZE

    def decode(self, name: str, parts: Parts, rows: np.ndarray, columns: slice) -> np.ndarray:
        inverse = np.float32(1) / parts["weight_global_scale"].read()
        scales = self.read_scales(parts, rows).view(E4M3).astype(np.float32) * inverse
        values = self.read_codes(parts, rows, columns).view(E2M1).astype(np.float32)
        return values * scales[:, self.read_groups(name, parts, columns)]

    def make_layer(self, in_size: int, out_size: int, *, in_: Dim, out: Dim) -> NVFP4Linear:
        return NVFP4Linear(jnp.zeros((out_size, in_size)), in_=in_, out=out)

    def list_whole_vectors(self) -> tuple[str, ...]:
        return ("global_scale",)

    def view_vectors(self, name: str, parts: Parts) -> Mapping[str, LazyTensor]:
        return {"global_scale": dataclasses.replace(parts["weight_global_scale"], keeps_dtype=True)}

    def list_file_parts(self, out: int, in_: int, scales: np.dtype) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        return {
            "weight_packed": ((out, in_ // 2), np.uint8),
            "weight_scale": ((out, in_ // BLOCK_SIZE), E4M3),
            "weight_global_scale": ((1,), np.float32),
        }

    def encode_part(self, suffix: str, read: Callable[[str], np.ndarray]) -> np.ndarray:
        if suffix == "weight_packed":
            codes = read("codes")
            return codes[:, 0::2] | codes[:, 1::2] << 4
        if suffix == "weight_scale":
            return read("constants").view(E4M3)
        return read("global_scale")
