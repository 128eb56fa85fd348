"""FP8 weights: codes in float8_e4m3fn, with a scale per block, per output row or per matrix.

    W[o, i] = scale[o // block_rows, i // block_columns] weight[o, i]

Blocks of 128 x 128 are DeepSeek-V3's (arXiv:2412.19437, section 3.3.2); the last ones may be smaller.
`weight_scale_inv` is the factor itself, in spite of its name.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from zoo.models.hf.errors import ConfigError
from zoo.models.hf.values import integer
from zoo.ops.quantized.groups import CodeKind

from .base import AbstractQuantizedFormat, Parts, check_options, count_groups, read_names, take_rows

SCALE_DTYPES = (np.float32, jnp.bfloat16, np.float16)


@dataclasses.dataclass(frozen=True)
class FP8Format(AbstractQuantizedFormat):
    """FP8 weights with a scale per block (`block`), or per output row (`"channel"`), or per matrix (`"tensor"`)."""

    name: ClassVar[str] = "FP8"
    block: tuple[int, int] | str
    scale: str = "weight_scale_inv"
    """End of the name of the scales."""

    @property
    def suffixes(self) -> Mapping[str, Collection[Any]]:
        return {"weight": (jnp.float8_e4m3fn,), self.scale: SCALE_DTYPES}

    def find_shape(self, parts: Parts) -> tuple[int, int]:
        out, in_ = parts["weight"].shape
        return out, in_

    def list_shapes(self, out: int, in_: int, parts: Parts) -> Mapping[str, Collection[tuple[int, ...]]]:
        if self.block == "channel":
            return {self.scale: [(out, 1)]}
        if isinstance(self.block, str):
            return {self.scale: [(), (1,)]}
        rows, columns = self.block
        return {self.scale: [(count_groups(out, rows), count_groups(in_, columns))]}

    @property
    def side_suffixes(self) -> tuple[str, ...]:
        if self.block == "tensor":
            return ("input_scale", "activation_scale", self.scale)
        return ("input_scale", "activation_scale")

    @property
    def kind(self) -> CodeKind:
        return "float8_e4m3fn"

    @property
    def input_group(self) -> int | None:
        return None if isinstance(self.block, str) else self.block[1]

    def read_codes(self, parts: Parts, rows: np.ndarray, columns: slice) -> np.ndarray:
        return take_rows(parts["weight"].read()[:, columns], rows)

    def read_scales(self, parts: Parts, rows: np.ndarray) -> np.ndarray:
        scales = parts[self.scale].read()
        if self.block == "tensor":
            return np.broadcast_to(scales.reshape(1, 1), (len(rows), 1))
        if self.block == "channel":
            return scales[rows]
        return scales[rows // self.block[0]]

    def read_groups(self, name: str, parts: Parts, columns: slice) -> np.ndarray:
        if isinstance(self.block, str):
            size = parts["weight"].shape[1]
        else:
            size = self.block[1]
        return np.arange(columns.start, columns.stop) // size

    def list_file_parts(self, out: int, in_: int, scales: np.dtype) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        weight = {"weight": ((out, in_), jnp.float8_e4m3fn)}
        if self.block == "tensor":
            return weight
        (shape,) = self.list_shapes(out, in_, {})[self.scale]
        return weight | {self.scale: (shape, scales)}

    def encode_part(self, suffix: str, read: Callable[[str], np.ndarray]) -> np.ndarray:
        if suffix == "weight":
            return read("codes").view(jnp.float8_e4m3fn)
        if isinstance(self.block, str):
            return read("scales")
        return read("scales")[:: self.block[0]]


def read_fp8(config: Mapping[str, Any]) -> FP8Format:
    """Read the config of `quant_method` "fp8". Activations, which its kernels quantize, are not quantized here.

    Without `weight_block_size` a matrix has blocks of 128 x 128, the default of transformers, and with null one scale;
    AutoFP8, which lists `ignored_layers` and no block size, names the scale of a matrix `weight_scale`.

    **Raises** `ConfigError` for options that are not covered.
    """
    required = {
        "fmt": ("e4m3", "float8_e4m3fn"),
        "activation_scheme": ("dynamic", "static"),
        "scale_fmt": ("float", "ue8m0", None),
        "expert_dtype": ("fp8",),
        "modules_to_convert": (None, []),
    }
    lists = ("modules_to_not_convert", "ignored_layers")
    check_options(config, required, (*lists, "weight_block_size", "dequantize", "packed_modules_mapping"))
    left_out = read_names(config, *lists)
    if "ignored_layers" in config and config.get("weight_block_size") is None:
        return FP8Format("tensor", "weight_scale", left_out=left_out)
    size = config.get("weight_block_size", [128, 128])
    block = "tensor" if size is None else read_block(size, "weight_block_size")
    return FP8Format(block, left_out=left_out)


def read_block(value: Any, key: str) -> tuple[int, int]:
    """Return (rows, columns) of a block. **Raises** `ConfigError` unless the value is two counts."""
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(map(integer(minimum=1).fits, value)):
        raise ConfigError(f"quantization_config: {key} = {value!r} should be two whole numbers above 0")
    return value[0], value[1]
