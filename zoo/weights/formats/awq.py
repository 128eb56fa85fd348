"""AWQ (Lin et al., arXiv:2306.00978) of version "gemm", as AutoAWQ stores it: 4 bits, packed along the outputs.

    W[o, i] = scales[g, o] (q[i, o] - z[g, o])        g = i // group_size

Output o is in word o // 8 of `qweight` (in, out / 8) and `qzeros` (groups, out / 8), at bits 4 p where
(0, 2, 4, 6, 1, 3, 5, 7)[p] = o mod 8.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from zoo.ops.quantized.groups import CodeKind

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
from .gptq import IGNORED_KEYS, read_group_size

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The number of the output at each place of a word."""
BITS = 4


@dataclasses.dataclass(frozen=True)
class AWQFormat(AbstractQuantizedFormat):
    """AWQ with 4 bits. `group_size` is None for one group of all inputs."""

    name: ClassVar[str] = "AWQ"

    group_size: int | None

    @property
    def suffixes(self) -> Mapping[str, Collection[Any]]:
        return {
            "qweight": (np.int32,),
            "qzeros": (np.int32,),
            "scales": (np.float16, jnp.bfloat16, np.float32),
        }

    def find_shape(self, parts: Parts) -> tuple[int, int]:
        in_, words = parts["qweight"].shape
        return words * len(ORDER), in_

    def list_shapes(self, out: int, in_: int, parts: Parts) -> Mapping[str, Collection[tuple[int, ...]]]:
        groups = count_groups(in_, self.group_size or in_)
        return {"qzeros": [(groups, out // len(ORDER))], "scales": [(groups, out)]}

    @property
    def kind(self) -> CodeKind:
        return "uint4"

    @property
    def has_zeros(self) -> bool:
        return True

    @property
    def input_group(self) -> int | None:
        return self.group_size

    def read_codes(self, parts: Parts, rows: np.ndarray, columns: slice) -> np.ndarray:
        return unpack_words(parts["qweight"].read()[columns], rows, BITS, ORDER).T

    def read_scales(self, parts: Parts, rows: np.ndarray) -> np.ndarray:
        return take_rows(parts["scales"].read(), rows, axis=1).T

    def read_zeros(self, name: str, parts: Parts, rows: np.ndarray) -> np.ndarray:
        return unpack_words(parts["qzeros"].read(), rows, BITS, ORDER).T

    def read_groups(self, name: str, parts: Parts, columns: slice) -> np.ndarray:
        return np.arange(columns.start, columns.stop) // (self.group_size or parts["qweight"].shape[0])

    def list_file_parts(self, out: int, in_: int, scales: np.dtype) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        groups = count_groups(in_, self.group_size or in_)
        words = out // len(ORDER)
        words_of = {"qweight": ((in_, words), np.int32), "qzeros": ((groups, words), np.int32)}
        return words_of | {"scales": ((groups, out), scales)}

    def encode_part(self, suffix: str, read: Callable[[str], np.ndarray]) -> np.ndarray:
        if suffix == "scales":
            return read("scales").T
        field = "codes" if suffix == "qweight" else "zeros"
        return pack_words(read(field).T, BITS, ORDER)


def read_awq(config: Mapping[str, Any]) -> AWQFormat:
    """Read the config of `quant_method` "awq". **Raises** `ConfigError` for options that are not covered."""
    versions = ("gemm", "GEMM", None)
    required = {
        "version": versions,
        "format": versions,
        "checkpoint_format": versions,
        "bits": (4,),
        "zero_point": (True,),
        "desc_act": (False, None),
    }
    ignored = ("group_size", "modules_to_not_convert", "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse")
    check_options(config, required, (*ignored, *IGNORED_KEYS))
    return AWQFormat(read_group_size(config), left_out=read_names(config, "modules_to_not_convert"))
