"""GPTQ (Frantar et al., arXiv:2210.17323), as AutoGPTQ and GPTQModel store it: 4 or 8 bits, packed along the inputs.

    W[o, i] = scales[g, o] (q[i, o] - z[g, o])        g = g_idx[i]

- `qweight` (in bits / 32, out), int32: q[i, o] at bits `bits (i mod 32 / bits)` of word i // (32 / bits).
- `qzeros` (groups, out bits / 32), int32: zero points, stored less one unless `checkpoint_format` is "gptq_v2".
- `g_idx` (in): the group of each input. With `desc_act` inputs were ordered by activations, and groups are spread.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from zoo.models.hf.errors import ConfigError
from zoo.models.hf.values import integer
from zoo.ops.quantized.groups import CodeKind

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

IGNORED_KEYS = (
    *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "sym", "lm_head", "group_size"),
    *("desc_act", "act_group_aware", "model_name_or_path", "model_file_base_name", "meta", "tokenizer", "dataset"),
    *("backend", "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "batch_size"),
    *("pad_token_id", "max_input_length", "cache_block_outputs", "modules_in_block_to_quantize", "use_cuda_fp16"),
    *("use_exllama", "disable_exllama", "exllama_config", "quantizer", "mse", "version", "modules_to_not_convert"),
    *("checkpoint_format", "format", "parallel_packing", "offload_to_disk", "offload_to_disk_path", "hyb_act"),
)
"""Keys of the quantizers, including AWQ's, that say how the numbers were found."""


@dataclasses.dataclass(frozen=True)
class GPTQFormat(AbstractQuantizedFormat):
    """GPTQ with `bits` 4 or 8. `group_size` is None for one group of all inputs; zero points are stored less
    `zero_offset`."""

    name: ClassVar[str] = "GPTQ"

    bits: int
    group_size: int | None
    reordered: bool
    """True if `g_idx` may hold any groups; otherwise groups are consecutive inputs."""
    zero_offset: int = 1

    @property
    def suffixes(self) -> Mapping[str, Collection[Any]]:
        codes = (np.int32,)
        scales = (np.float16, jnp.bfloat16, np.float32)
        return {"qweight": codes, "qzeros": codes, "scales": scales, "g_idx": codes}

    def find_shape(self, parts: Parts) -> tuple[int, int]:
        words, out = parts["qweight"].shape
        return out, words * 32 // self.bits

    def list_shapes(self, out: int, in_: int, parts: Parts) -> Mapping[str, Collection[tuple[int, ...]]]:
        groups = count_groups(in_, self.group_size or in_)
        return {"qzeros": [(groups, out * self.bits // 32)], "scales": [(groups, out)], "g_idx": [(in_,)]}

    def find_errors(self, name: str, parts: Parts) -> Iterator[str]:
        yield from super().find_errors(name, parts)
        if parts["qweight"].shape[-1:] and parts["qweight"].shape[-1] % (32 // self.bits):
            yield (
                f"{name} has {parts['qweight'].shape[-1]} outputs, not a multiple of the {32 // self.bits} numbers "
                "in an int32"
            )

    @property
    def kind(self) -> CodeKind:
        return "uint4" if self.bits == 4 else "uint8"

    @property
    def has_zeros(self) -> bool:
        return True

    @property
    def input_group(self) -> int | None:
        return self.group_size

    @property
    def is_reordered(self) -> bool:
        return self.reordered

    def read_codes(self, parts: Parts, rows: np.ndarray, columns: slice) -> np.ndarray:
        per_word = 32 // self.bits
        first = columns.start // per_word
        words = take_rows(parts["qweight"].read()[first : -(-columns.stop // per_word)], rows, axis=1)
        return unpack_words(words.T, np.arange(columns.start, columns.stop) - first * per_word, self.bits)

    def read_scales(self, parts: Parts, rows: np.ndarray) -> np.ndarray:
        return take_rows(parts["scales"].read(), rows, axis=1).T

    def read_zeros(self, name: str, parts: Parts, rows: np.ndarray) -> np.ndarray:
        """**Raises** `CheckpointError` for a zero point that readers of this format disagree about."""
        zeros = unpack_words(parts["qzeros"].read(), rows, self.bits).T
        if self.zero_offset and (zeros == 2**self.bits - 1).any():
            raise CheckpointError(
                f"{name}.qzeros holds {2**self.bits - 1} for a zero point less one, which some readers take for "
                f"{2**self.bits} and others for 0: quantize with checkpoint_format 'gptq_v2', which stores it as it is"
            )
        return zeros + np.uint8(self.zero_offset)

    def read_groups(self, name: str, parts: Parts, columns: slice) -> np.ndarray:
        """**Raises** `CheckpointError` for a group that does not exist, and without `desc_act` for groups that are not
        consecutive inputs."""
        groups = parts["g_idx"].read()[columns]
        in_ = self.find_shape(parts)[1]
        if len(groups) and not 0 <= groups.min() <= groups.max() < parts["scales"].shape[0]:
            raise CheckpointError(f"{name}.g_idx has groups that are not among the {parts['scales'].shape[0]}")
        expected = np.arange(columns.start, columns.stop) // (self.group_size or in_)
        if not self.reordered and not np.array_equal(groups, expected):
            raise CheckpointError(f"{name}.g_idx reorders the inputs, and the config says desc_act = false")
        return groups

    def list_file_parts(self, out: int, in_: int, scales: np.dtype) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        shapes = self.list_shapes(out, in_, {})
        per_word = 32 // self.bits
        parts = {suffix: (next(iter(shape)), np.int32) for suffix, shape in shapes.items()}
        return parts | {"qweight": ((in_ // per_word, out), np.int32), "scales": (parts["scales"][0], scales)}

    def encode_part(self, suffix: str, read: Callable[[str], np.ndarray]) -> np.ndarray:
        if suffix == "qweight":
            return pack_words(read("codes"), self.bits).T
        if suffix == "qzeros":
            return pack_words(read("zeros").T - np.uint8(self.zero_offset), self.bits)
        if suffix == "scales":
            return read("scales").T
        return read("group_index")


def read_gptq(config: Mapping[str, Any]) -> GPTQFormat:
    """Read the config of `quant_method` "gptq". **Raises** `ConfigError` for options that are not covered."""
    formats = ("gptq", "gptq_v2", None)
    required = {
        "bits": (4, 8),
        "checkpoint_format": formats,
        "format": formats,
        "dynamic": ({}, None),
        "is_marlin_format": (False, None),
        "pack_dtype": ("int32", None),
        "sym": (True, False),
        "desc_act": (True, False),
    }
    check_options(config, required, IGNORED_KEYS)
    if "bits" not in config:
        raise ConfigError("quantization_config: bits is missing, and 4 or 8 is read")
    is_v2 = "gptq_v2" in (config.get("checkpoint_format"), config.get("format"))
    left_out = read_names(config, "modules_to_not_convert")
    group_size = read_group_size(config)
    reordered = config.get("desc_act", False)
    zero_offset = 0 if is_v2 else 1
    return GPTQFormat(config["bits"], group_size, reordered, zero_offset, left_out=left_out)


def read_group_size(config: Mapping[str, Any], default: int = 128) -> int | None:
    """Return `group_size`; None for -1, which means one group. **Raises** `ConfigError` for any other non-count."""
    if (size := config.get("group_size", default)) == -1:
        return None
    if not integer(minimum=1).fits(size):
        raise ConfigError(f"quantization_config: group_size = {size!r} should be a whole number above 0, or -1")
    return size
