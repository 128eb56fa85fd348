"""compressed-tensors, the format of llm-compressor: float-quantized (FP8), pack-quantized (4 or 8 bits), and NVFP4.

Float-quantized matrices are `weight` in float8_e4m3fn and `weight_scale`, per block, output row or matrix:
`zoo.weights.formats.fp8`. NVFP4 is `zoo.weights.formats.nvfp4`. Pack-quantized ones are

    W[o, i] = weight_scale[o, g] (q[o, i] - z[o, g])        g = i // group_size, or weight_g_idx[i]

- `weight_packed` (out, in bits / 32), int32: q[o, i] at bits `bits (i mod 32 / bits)`; the last word may be filled up.
- `weight_zero_point` (out bits / 32, groups), int32, packed along the outputs; symmetric matrices have none, and z =
  2^(bits - 1), since signed numbers are stored with this offset added.
- `weight_shape`: (out, in).
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from zoo.layers.quantized.groups import AbstractGroupLinear, GroupQuantizedLinear, NVFP4Linear
from zoo.models.hf.errors import ConfigError
from zoo.ops.quantized.groups import CodeKind
from zoo.ops.quantized.nvfp4 import BLOCK_SIZE

from ..safetensors import CheckpointError
from .base import (
    AbstractQuantizedFormat,
    Parts,
    check_options,
    count_groups,
    pack_words,
    read_names,
    take_rows,
    unpack_words,
)
from .fp8 import SCALE_DTYPES, FP8Format, read_block
from .gptq import read_group_size
from .nvfp4 import NVFP4Format

_REORDERED = ("group", "dynamic")
"""Values of `actorder` for which the group of each input is stored; two words for one order."""
_NVFP4_SCHEME = {"num_bits": (4,), "type": ("float",), "strategy": ("tensor_group",), "group_size": (BLOCK_SIZE,)}


@dataclasses.dataclass(frozen=True)
class PackQuantizedFormat(AbstractQuantizedFormat):
    """compressed-tensors of the format pack-quantized. `group_size` is None for one group of all inputs."""

    name: ClassVar[str] = "compressed-tensors pack-quantized"

    bits: int
    group_size: int | None
    symmetric: bool
    reordered: bool = False

    @property
    def suffixes(self) -> Mapping[str, Collection[Any]]:
        found: dict[str, Collection[Any]] = {
            "weight_packed": (np.int32,),
            "weight_scale": SCALE_DTYPES,
            "weight_shape": (np.int64, np.int32),
        }
        if not self.symmetric:
            found["weight_zero_point"] = (np.int32,)
        if self.reordered:
            found["weight_g_idx"] = (np.int32,)
        return found

    def find_shape(self, parts: Parts) -> tuple[int, int]:
        shape = parts["weight_shape"].read()
        if shape.shape != (2,):
            raise ValueError("weight_shape is not a pair")
        return int(shape[0]), int(shape[1])

    def list_shapes(self, out: int, in_: int, parts: Parts) -> Mapping[str, Collection[tuple[int, ...]]]:
        groups = count_groups(in_, self.group_size or max(in_, 1))
        per_word = 32 // self.bits
        return {
            "weight_packed": [(out, count_groups(in_, per_word))],
            "weight_scale": [(out, groups)],
            "weight_zero_point": [(count_groups(out, per_word), groups)],
            "weight_g_idx": [(in_,)],
        }

    def find_errors(self, name: str, parts: Parts) -> Iterator[str]:
        if parts["weight_shape"].shape == (2,):
            shape = parts["weight_shape"].read()
        else:
            shape = np.ones(2)
        if (shape <= 0).any():
            yield f"{name}.weight_shape is {shape.tolist()}"
            return
        yield from super().find_errors(name, parts)

    @property
    def kind(self) -> CodeKind:
        return "uint4" if self.bits == 4 else "uint8"

    @property
    def input_group(self) -> int | None:
        return self.group_size

    @property
    def is_reordered(self) -> bool:
        return self.reordered

    @property
    def has_zeros(self) -> bool:
        return not self.symmetric

    def read_codes(self, parts: Parts, rows: np.ndarray, columns: slice) -> np.ndarray:
        words = take_rows(parts["weight_packed"].read(), rows)
        return unpack_words(words, np.arange(columns.start, columns.stop), self.bits)

    def read_scales(self, parts: Parts, rows: np.ndarray) -> np.ndarray:
        return take_rows(parts["weight_scale"].read(), rows)

    def read_zeros(self, name: str, parts: Parts, rows: np.ndarray) -> np.ndarray | int:
        if self.symmetric:
            return 2 ** (self.bits - 1)
        return unpack_words(parts["weight_zero_point"].read().T, rows, self.bits).T

    def read_groups(self, name: str, parts: Parts, columns: slice) -> np.ndarray:
        """**Raises** `CheckpointError` for a group that does not exist."""
        if not self.reordered:
            return np.arange(columns.start, columns.stop) // (self.group_size or self.find_shape(parts)[1])
        groups = parts["weight_g_idx"].read()[columns]
        count = parts["weight_scale"].shape[1]
        if len(groups) and not 0 <= groups.min() <= groups.max() < count:
            raise CheckpointError(f"{name}.weight_g_idx has groups that are not among the {count}")
        return groups

    def find_packing_errors(self, name: str, parts: Parts) -> Iterator[str]:
        out, in_ = self.find_shape(parts)
        per_word = 32 // self.bits
        if in_ % per_word or (not self.symmetric and out % per_word):
            yield f"{name} is a matrix of [{out}, {in_}], and words of {per_word} numbers are not filled up"
        if parts["weight_shape"].dtype != np.int64:
            yield f"{name}.weight_shape is {parts['weight_shape'].dtype}, and is written as int64"

    def list_file_parts(self, out: int, in_: int, scales: np.dtype) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        dtypes = dict.fromkeys(self.suffixes, np.dtype(np.int32)) | {"weight_scale": scales, "weight_shape": np.int64}
        shapes = {**self.list_shapes(out, in_, {}), "weight_shape": [(2,)]}
        return {suffix: (next(iter(shapes[suffix])), dtype) for suffix, dtype in dtypes.items()}

    def encode_part(self, suffix: str, read: Callable[[str], np.ndarray]) -> np.ndarray:
        if suffix == "weight_packed":
            return pack_words(read("codes"), self.bits)
        if suffix == "weight_zero_point":
            return pack_words(read("zeros").T, self.bits).T
        if suffix == "weight_shape":
            return np.array(read("codes").shape, np.int64)
        if suffix == "weight_scale":
            return read("scales")
        return read("group_index")


def read_compressed_tensors(config: Mapping[str, Any]) -> FP8Format | PackQuantizedFormat | NVFP4Format:
    """Read the config of `quant_method` "compressed-tensors". Activations are not quantized here.

    **Raises** `ConfigError` for options that are not covered.
    """
    required = {
        "format": ("float-quantized", "pack-quantized", "nvfp4-pack-quantized"),
        "quantization_status": ("compressed", "frozen", None),
        "kv_cache_scheme": (None,),
        "transform_config": ({}, None),
    }
    ignored = ("ignore", "config_groups", "global_compression_ratio", "version", "run_compressed", "sparsity_config")
    check_options(config, required, ignored)
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise ConfigError(f"quantization_config: sparsity_config = {sparsity!r}, and the format 'dense' is read")
    left_out = read_names(config, "ignore")
    scheme = _find_scheme(config)
    if config.get("format") == "float-quantized":
        return FP8Format(_read_fp8_block(scheme), "weight_scale", left_out=left_out)
    if config.get("format") == "nvfp4-pack-quantized":
        _check_scheme(scheme, _NVFP4_SCHEME)
        return NVFP4Format(left_out=left_out)
    if config.get("format") != "pack-quantized":
        raise ConfigError("quantization_config: format is missing, and 'float-quantized' or 'pack-quantized' is read")
    _check_scheme(scheme, {"num_bits": (4, 8), "type": ("int",), "strategy": ("group", "channel")})
    group_size = None
    if scheme.get("strategy") == "group":
        group_size = read_group_size({"group_size": scheme.get("group_size")})
    return PackQuantizedFormat(
        scheme["num_bits"],
        group_size,
        scheme.get("symmetric", True),
        scheme.get("actorder") in _REORDERED,
        left_out=left_out,
    )


def describe_packing(layer: AbstractGroupLinear) -> dict[str, Any] | None:
    """Return the `quantization_config` of a matrix as `zoo.adapters.quantize` packs it to int4 or NVFP4, without the
    names of modules that are not quantized; None for the matrices of other formats."""
    if isinstance(layer, NVFP4Linear):
        name = "nvfp4-pack-quantized"
        scheme = {"num_bits": 4, "type": "float", "strategy": "tensor_group"}
    elif _is_plain_int4(layer):
        name = "pack-quantized"
        scheme = {"num_bits": 4, "type": "int", "strategy": "group"}
    else:
        return None
    weights = {**scheme, "group_size": layer.group_size, "symmetric": True, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    header = {"quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed"}
    return {**header, "config_groups": groups}


def _is_plain_int4(layer: AbstractGroupLinear) -> bool:
    """Return True for int4 without zero points, in groups of consecutive inputs."""
    if not isinstance(layer, GroupQuantizedLinear) or layer.kind != "uint4":
        return False
    return layer.zeros is None and layer.group_index is None


def _find_scheme(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the scheme of all weights. **Raises** `ConfigError` if there are several, or none."""
    groups = config.get("config_groups")
    if isinstance(groups, Mapping):
        groups = [group for group in groups.values() if isinstance(group, Mapping)]
    else:
        groups = []
    for group in groups:
        if (own := group.get("format")) not in (None, config.get("format")):
            raise ConfigError(
                f"quantization_config: a group has the format {own!r}, and the file {config.get('format')!r}"
            )
    schemes = [group.get("weights") for group in groups]
    first = next(iter(schemes), None)
    if not isinstance(first, Mapping) or any(scheme != first for scheme in schemes):
        raise ConfigError("quantization_config: config_groups should have one scheme for the weights of all groups")
    return first


def _read_fp8_block(scheme: Mapping[str, Any]) -> tuple[int, int] | str:
    """Return the block of FP8 scales, or "channel" or "tensor"."""
    strategies = ("tensor", "channel", "block")
    _check_scheme(scheme, {"num_bits": (8,), "type": ("float",), "strategy": strategies, "symmetric": (True,)})
    if scheme["strategy"] != "block":
        return scheme["strategy"]
    return read_block(scheme.get("block_structure"), "block_structure")


def _check_scheme(scheme: Mapping[str, Any], needed: Mapping[str, Collection[Any]]) -> None:
    """**Raises** `ConfigError` for a scheme of weights that is not covered."""
    if missing := needed.keys() - scheme.keys() - {"symmetric"}:
        raise ConfigError(f"quantization_config: weights lack {', '.join(sorted(missing))}")
    required = {"symmetric": (True, False), **needed, "dynamic": (False, None), "actorder": (None, "weight", "static")}
    if "group" in needed["strategy"]:
        required["actorder"] = (*required["actorder"], *_REORDERED)
    ignored = ("group_size", "block_structure", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    check_options({"quant_method": "compressed-tensors", **scheme}, required, ignored)
