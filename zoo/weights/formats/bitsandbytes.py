"""bitsandbytes: NF4 with or without double quantization (arXiv:2305.14314), and LLM.int8 (arXiv:2208.07339).

NF4 has blocks of `blocksize` numbers in memory order, across rows:

    W[n] = quant_map[code[n]] absmax[n // blocksize]

`weight` (numbers / 2, 1), uint8, holds two codes in a byte, the earlier one in the high nibble. With double
quantization the block constants are codes too:

    absmax[b] = nested_quant_map[code[b]] nested_absmax[b // nested_blocksize] + nested_offset

`quant_state.bitsandbytes__nf4` is JSON with the sizes and the offset. LLM.int8 has a scale per output row:

    W[o, i] = weight[o, i] SCB[o] / 127
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from zoo.layers.quantized.groups import AbstractGroupLinear, NestedNF4Linear
from zoo.models.hf.errors import ConfigError
from zoo.ops.quantized.groups import INT8_STEP, NESTED_GROUP_SIZE, CodeKind
from zoo.ops.quantized.nf4 import BLOCK_SIZE, CODEBOOK
from zoo.parallel import Dim

from ..safetensors import LazyTensor
from .base import AbstractQuantizedFormat, Parts, check_options, count_groups, read_names, take_rows
from .lazy import make_lazy_matrix

_STATE = "weight.quant_state.bitsandbytes__nf4"


@dataclasses.dataclass(frozen=True)
class NF4Format(AbstractQuantizedFormat):
    """NF4 of bitsandbytes. `nested` says whether the config has double quantization. Only packed layers ask for it;
    otherwise files are decoded by the quant_state of each matrix."""

    name: ClassVar[str] = "bitsandbytes NF4"
    optional_suffixes: ClassVar[Mapping[str, Collection[Any]]] = {
        "weight.nested_absmax": (np.float32,),
        "weight.nested_quant_map": (np.float32,),
    }

    nested: bool

    @property
    def suffixes(self) -> Mapping[str, Collection[Any]]:
        absmax = (np.float32, np.uint8)
        return {"weight": (np.uint8,), "weight.absmax": absmax, "weight.quant_map": (np.float32,), _STATE: (np.uint8,)}

    @property
    def side_suffixes(self) -> tuple[str, ...]:
        return _STATE, "weight.quant_map", "weight.nested_quant_map"

    @property
    def kind(self) -> CodeKind:
        return "nf4"

    @property
    def input_group(self) -> int | None:
        return BLOCK_SIZE

    @property
    def scale_field(self) -> str:
        return "constants" if self.nested else "scales"

    def find_shape(self, parts: Parts) -> tuple[int, int]:
        out, in_ = _read_state(parts)["shape"]
        return out, in_

    def list_shapes(self, out: int, in_: int, parts: Parts) -> Mapping[str, Collection[tuple[int, ...]]]:
        state = _read_state(parts)
        packed = count_groups(out * in_, 2)
        blocks = count_groups(out * in_, state["blocksize"])
        shapes = {"weight": [(packed, 1), (1, packed)], "weight.absmax": [(blocks,)], "weight.quant_map": [(16,)]}
        if "nested_blocksize" in state:
            shapes["weight.nested_absmax"] = [(count_groups(blocks, state["nested_blocksize"]),)]
            shapes["weight.nested_quant_map"] = [(256,)]
        return shapes

    def find_errors(self, name: str, parts: Parts) -> Iterator[str]:
        try:
            state = _read_state(parts)
        except ValueError as error:
            yield f"{name}.{_STATE} is damaged: {error}"
            return
        if state["quant_type"] != "nf4":
            yield f"{name} is of the quant_type {state['quant_type']!r}, and nf4 is read"
        nested = {"weight.nested_absmax", "weight.nested_quant_map"}
        if "nested_blocksize" not in state and (found := nested & parts.keys()):
            yield f"{name} has {', '.join(sorted(found))}, and its quant_state says otherwise"
        elif "nested_blocksize" in state and (found := nested - parts.keys()):
            yield f"{name} lacks its {', '.join(sorted(found))}, and its quant_state says otherwise"
        elif ("nested_blocksize" in state) != (parts["weight.absmax"].dtype == np.uint8):
            yield f"{name}.weight.absmax is {parts['weight.absmax'].dtype}, and its quant_state says otherwise"
        else:
            yield from super().find_errors(name, parts)

    def read_codes(self, parts: Parts, rows: np.ndarray, columns: slice) -> np.ndarray:
        numbers = rows[:, None] * self.find_shape(parts)[1] + np.arange(columns.start, columns.stop)
        packed = parts["weight"].read().reshape(-1)[numbers // 2]
        return np.where(numbers % 2 == 0, packed >> 4, packed & 15)

    def decode(self, name: str, parts: Parts, rows: np.ndarray, columns: slice) -> np.ndarray:
        """Decode blocks of any size, which may begin inside a row."""
        state = _read_state(parts)
        in_ = self.find_shape(parts)[1]
        codes = self.read_codes(parts, rows, columns)
        blocks = (rows[:, None] * in_ + np.arange(columns.start, columns.stop)) // state["blocksize"]
        constants = parts["weight.absmax"].read()[blocks]
        if "nested_blocksize" in state:
            nested = parts["weight.nested_absmax"].read()[blocks // state["nested_blocksize"]]
            constants = parts["weight.nested_quant_map"].read()[constants] * nested
            constants += np.float32(state["nested_offset"])
        return parts["weight.quant_map"].read()[codes] * constants

    def find_packing_errors(self, name: str, parts: Parts) -> Iterator[str]:
        state = _read_state(parts)
        out, in_ = self.find_shape(parts)
        if in_ % BLOCK_SIZE:
            yield f"{name} is a matrix of [{out}, {in_}], and blocks of {BLOCK_SIZE} numbers begin inside its rows"
            return
        found = state["blocksize"], state.get("nested_blocksize")
        nested_size = NESTED_GROUP_SIZE if self.nested else None
        wanted = BLOCK_SIZE, nested_size
        if found != wanted:
            yield f"{name} has blocksize and nested_blocksize {found}: expected {wanted}"
        if parts["weight"].shape[1:] != (1,):
            yield f"{name}.weight is {list(parts['weight'].shape)}: expected one column"
        if not np.array_equal(parts["weight.quant_map"].read(), CODEBOOK):
            yield f"{name}.weight.quant_map is not the codebook of NF4"

    def read_scales(self, parts: Parts, rows: np.ndarray) -> np.ndarray:
        return parts["weight.absmax"].read().reshape(self.find_shape(parts)[0], -1)[rows]

    def read_groups(self, name: str, parts: Parts, columns: slice) -> np.ndarray:
        return np.arange(columns.start, columns.stop) // BLOCK_SIZE

    def make_layer(self, in_size: int, out_size: int, *, in_: Dim, out: Dim) -> AbstractGroupLinear:
        if self.nested:
            return NestedNF4Linear(in_size, out_size, in_=in_, out=out)
        return super().make_layer(in_size, out_size, in_=in_, out=out)

    def list_whole_vectors(self) -> tuple[str, ...]:
        return ("table", "offset") if self.nested else ()

    def view_vectors(self, name: str, parts: Parts) -> Mapping[str, LazyTensor]:
        if not self.nested:
            return {}
        out, in_ = self.find_shape(parts)
        steps = parts["weight.nested_absmax"]
        groups = in_ // BLOCK_SIZE
        first = np.arange(out) * groups

        def read_steps(rows: np.ndarray, columns: slice) -> np.ndarray:
            numbers = first[rows, None] // NESTED_GROUP_SIZE + np.arange(columns.start, columns.stop)
            return steps.read()[np.minimum(numbers, steps.shape[0] - 1)]

        read_first = lambda: (first % NESTED_GROUP_SIZE).astype(np.uint8)
        read_offset = lambda: np.array([_read_state(parts)["nested_offset"]], np.float32)
        shape = out, NestedNF4Linear.count_steps(groups)
        return {
            "steps": make_lazy_matrix(f"{name}.steps", steps.dtype, shape, read_steps, parts, keeps_dtype=True),
            "first": LazyTensor(np.dtype(np.uint8), (out,), read_first, keeps_dtype=True),
            "table": dataclasses.replace(parts["weight.nested_quant_map"], keeps_dtype=True),
            "offset": LazyTensor(np.dtype(np.float32), (1,), read_offset, keeps_dtype=True),
        }

    def list_file_parts(self, out: int, in_: int, scales: np.dtype) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        blocks = out * in_ // BLOCK_SIZE
        parts = {"weight": ((out * in_ // 2, 1), np.uint8), "weight.absmax": ((blocks,), scales)}
        if self.nested:
            parts["weight.nested_absmax"] = ((count_groups(blocks, NESTED_GROUP_SIZE),), np.float32)
        return parts

    def encode_part(self, suffix: str, read: Callable[[str], np.ndarray]) -> np.ndarray:
        if suffix == "weight":
            codes = read("codes").reshape(-1, 2)
            return (codes[:, :1] << 4) | codes[:, 1:]
        if suffix == "weight.absmax":
            return read(self.scale_field).reshape(-1)
        rows, groups = read(self.scale_field).shape
        first = np.arange(0, rows * groups, NESTED_GROUP_SIZE)  # the first constant of each step
        row = first // groups
        return read("steps")[row, first // NESTED_GROUP_SIZE - row * groups // NESTED_GROUP_SIZE]


def _read_state(parts: Parts) -> dict[str, Any]:
    """Return the quant_state. **Raises** `ValueError` for text that is not JSON, or lacks keys."""
    state = json.loads(bytes(parts[_STATE].read()))
    sizes = ["blocksize"]
    if isinstance(state, dict) and "nested_blocksize" in state:
        sizes.append("nested_blocksize")
    is_count = lambda value: type(value) is int and 0 < value < 2**48
    if not isinstance(state, dict) or not all(is_count(state.get(key)) for key in sizes) or "quant_type" not in state:
        raise ValueError(f"expected quant_type and {' and '.join(sizes)} above 0")
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(map(is_count, shape)):
        raise ValueError(f"expected the shape of a matrix, got {shape!r}")
    if "nested_blocksize" in state and not isinstance(state.get("nested_offset"), float | int):
        raise ValueError("nested_offset is missing")
    return state


@dataclasses.dataclass(frozen=True)
class Int8Format(AbstractQuantizedFormat):
    """LLM.int8 of bitsandbytes."""

    name: ClassVar[str] = "bitsandbytes int8"
    optional_suffixes: ClassVar[Mapping[str, Collection[Any]]] = {"weight_format": (np.uint8,)}

    @property
    def suffixes(self) -> Mapping[str, Collection[Any]]:
        return {"weight": (np.int8,), "SCB": (np.float32,)}

    @property
    def side_suffixes(self) -> tuple[str, ...]:
        return ("weight_format",)

    @property
    def kind(self) -> CodeKind:
        return "int8"

    @property
    def input_group(self) -> int | None:
        return None

    def find_shape(self, parts: Parts) -> tuple[int, int]:
        out, in_ = parts["weight"].shape
        return out, in_

    def list_shapes(self, out: int, in_: int, parts: Parts) -> Mapping[str, Collection[tuple[int, ...]]]:
        return {"SCB": [(out,)], "weight_format": [()]}

    def find_errors(self, name: str, parts: Parts) -> Iterator[str]:
        """Yield also an error for codes in another order than row by row."""
        yield from super().find_errors(name, parts)
        if "weight_format" in parts and parts["weight_format"].shape == () and parts["weight_format"].read() != 0:
            yield f"{name}.weight_format is {parts['weight_format'].read()}, and rows in order (0) are read"

    def read_codes(self, parts: Parts, rows: np.ndarray, columns: slice) -> np.ndarray:
        return take_rows(parts["weight"].read()[:, columns], rows)

    def read_scales(self, parts: Parts, rows: np.ndarray) -> np.ndarray:
        return parts["SCB"].read()[rows][:, None]

    def read_groups(self, name: str, parts: Parts, columns: slice) -> np.ndarray:
        return np.zeros(columns.stop - columns.start, np.int32)

    def decode(self, name: str, parts: Parts, rows: np.ndarray, columns: slice) -> np.ndarray:
        return super().decode(name, parts, rows, columns) * INT8_STEP

    def list_file_parts(self, out: int, in_: int, scales: np.dtype) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        return {"weight": ((out, in_), np.int8), "SCB": ((out,), scales)}

    def encode_part(self, suffix: str, read: Callable[[str], np.ndarray]) -> np.ndarray:
        if suffix == "weight":
            return read("codes").view(np.int8)
        return read("scales")[:, 0]


def read_bitsandbytes(config: Mapping[str, Any]) -> NF4Format | Int8Format:
    """Read the config of `quant_method` "bitsandbytes". **Raises** `ConfigError` for options that are not covered."""
    required = {"bnb_4bit_quant_type": ("nf4",), "bnb_4bit_quant_storage": ("uint8",)}
    bits = ("load_in_4bit", "_load_in_4bit", "load_in_8bit", "_load_in_8bit")
    ignored = ("bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant", "llm_int8_skip_modules", "llm_int8_threshold")
    ignored += ("llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "bnb_4bit_target_parameters")
    is_4bit = any(config.get(key) is True for key in bits[:2])
    is_8bit = any(config.get(key) is True for key in bits[2:])
    if is_8bit:  # files of int8 hold defaults of the other kind
        required = {}
        ignored += ("bnb_4bit_quant_type", "bnb_4bit_quant_storage")
    check_options(config, required, (*bits, *ignored))
    if is_4bit == is_8bit:
        raise ConfigError("quantization_config: one of load_in_4bit and load_in_8bit should be true")
    left_out = read_names(config, "llm_int8_skip_modules")
    nested = config.get("bnb_4bit_use_double_quant", False)
    if is_4bit:
        return NF4Format(nested is True, left_out=left_out)
    return Int8Format(left_out=left_out)
