"""Quantized checkpoint files: a `quantization_config`, and the tensors that stand for each matrix.

A format is a small class with its tensors' names, dtypes and shapes, and the formula of the numbers.
`dequantize_lazily` decodes matrices slice by slice; `pack_model` keeps them packed, and `unpack_tensors` writes them.
MXFP4, whose tensors hold all experts, is `zoo.weights.packed`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from zoo.models.hf.errors import ConfigError

from .awq import read_awq
from .base import AbstractQuantizedFormat
from .bitsandbytes import read_bitsandbytes
from .compressed_tensors import read_compressed_tensors
from .fp8 import read_fp8
from .gptq import read_gptq

QUANTIZATION_KEY = "quantization_config"
"""The config key that says that weight matrices are quantized."""
_READERS: Mapping[str, Callable[[Mapping[str, Any]], AbstractQuantizedFormat]] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "gptq": read_gptq,
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
}
"""By `quant_method`."""
_COVERED = (
    "fp8, compressed-tensors (float-quantized, pack-quantized, nvfp4-pack-quantized), gptq, awq, "
    "bitsandbytes (NF4, int8), mxfp4 (GPT-OSS)"
)


def split_quantization(config: Mapping[str, Any]) -> tuple[dict[str, Any], AbstractQuantizedFormat | None]:
    """Return a config without its `quantization_config`, and the format that the key describes. The format is None for
    MXFP4, whose key is left to the family, and without quantization.

    **Raises** `ConfigError` for a format that is not covered, with the formats that are.
    """
    value = config.get(QUANTIZATION_KEY)
    if not isinstance(value, Mapping) or (method := value.get("quant_method")) == "mxfp4":
        return dict(config), None
    if method is None and (value.get("load_in_4bit") is True or value.get("load_in_8bit") is True):
        method = "bitsandbytes"  # files of 2023 do not name it
    if not isinstance(method, str) or method not in _READERS:
        raise ConfigError(f"{QUANTIZATION_KEY}: quant_method {method!r} is not read. Formats that are: {_COVERED}")
    plain = {key: x for key, x in config.items() if key != QUANTIZATION_KEY}
    return plain, _READERS[method](value)
