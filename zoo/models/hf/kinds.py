"""Kinds of values that the keys of a config.json accept: the kind of the default, or one that stands beside it.

DEFAULTS = {
    "hidden_size": 4096,                     # a whole number above 0
    "rms_norm_eps": 1e-6,                    # a number, not below 0 since the key ends in _eps
    "num_key_value_heads": optional_count(), # a whole number above 0, or null
    "router_jitter_noise": Default(0.01, NON_NEGATIVE_NUMBER),
}
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from .values import (
    BOOL,
    NON_NEGATIVE_NUMBER,
    NUMBER,
    POSITIVE_NUMBER,
    WORD,
    ValueKind,
    integer,
    list_of,
    optional,
)

COUNT = integer(minimum=1)
SIZE = ValueKind(
    "a whole number above 0, or two: height and width",
    lambda value: COUNT.fits(value) or (list_of(COUNT).fits(value) and len(value) == 2),
)
COUNT_PER_LAYER = ValueKind(
    "a whole number above 0, or a list of one per layer",
    lambda value: COUNT.fits(value) or list_of(COUNT).fits(value),
)
WINDOW_PATTERN = optional(
    ValueKind(
        "a whole number, or a word of the letters L and G",
        lambda value: integer(minimum=0).fits(value) or (WORD.fits(value) and value != "" and set(value) <= set("LG")),
    )
)
_KINDS_OF_DEFAULTS = ((bool, BOOL), (int, COUNT), (float, NUMBER), (str, WORD))
"""By the type of the default; a bool is an int, too, so it comes first."""


@dataclasses.dataclass(frozen=True)
class Default:
    """A default whose key accepts other values than its type says."""

    value: Any
    kind: ValueKind


def optional_count(value: int | None = None) -> Default:
    """Return the default of a key that is a whole number above 0, or null."""
    return Default(value, optional(COUNT))


def non_negative(value: int) -> Default:
    """Return the default of a key that is a whole number not below 0."""
    return Default(value, integer(minimum=0))


def optional_non_negative(value: int | None = None) -> Default:
    """Return the default of a key that is a whole number not below 0, or null. Qwen2-MoE's class writes a window of 0
    for full attention."""
    return Default(value, optional(integer(minimum=0)))


def optional_number(value: float | None = None) -> Default:
    """Return the default of a key that is a number above 0, or null."""
    return Default(value, optional(POSITIVE_NUMBER))


def optional_words() -> Default:
    """Return the default, null, of a key that is a list of words, such as the type of each layer."""
    return Default(None, optional(list_of(WORD)))


def optional_layer_numbers() -> Default:
    """Return the default, null, of a key that is a list of layer numbers, or of a number per layer."""
    return Default(None, optional(list_of(integer(minimum=0))))


def get_kind(key: str, default: Any) -> ValueKind:
    """Return the kind of value that a key accepts. **Raises** `ValueError` for a default that does not tell."""
    if isinstance(default, Default):
        return default.kind
    if isinstance(default, float) and key.endswith("_eps"):
        return NON_NEGATIVE_NUMBER
    kind = next((kind for type_, kind in _KINDS_OF_DEFAULTS if isinstance(default, type_)), None)
    if kind is None:
        raise ValueError(
            f"the default {default!r} of {key} does not tell which values the key accepts: write optional_count() or "
            "another Default of zoo.models.hf.kinds"
        )
    return kind


def is_mxfp4(value: Any) -> bool:
    """Return True for a quantization config of MXFP4 weights without further options. The modules that are not
    quantized are read off the tensors."""
    if not isinstance(value, Mapping) or value.get("quant_method") != "mxfp4":
        return False
    is_valid = optional(list_of(WORD)).fits(value.get("modules_to_not_convert"))
    is_valid = is_valid and optional(BOOL).fits(value.get("dequantize"))
    return is_valid and value.keys() <= {"quant_method", "modules_to_not_convert", "dequantize"}


MXFP4 = ValueKind(
    "null or quant_method 'mxfp4': another one would change the result", lambda x: x is None or is_mxfp4(x)
)
