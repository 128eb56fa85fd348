"""Costs of a compiled step: FLOPs, memory traffic, collectives by mesh axis, memory, buffer donation, compile times.

Functions of a step and its arguments, and summaries of a model; models do not depend on them.
"""

from typing import Any

from .collectives import Collective
from .drift import Drift, drift
from .dtypes import DtypeAudit, audit_dtypes
from .implementations import ModelImplementations, implementations
from .operations import Flops, count_flops
from .parameters import ModelSummary, summary
from .program import CompiledProgram, DonationError, compiled
from .size import ModelSize, measure_size
from .state import state_bytes

__all__ = [
    "Collective",
    "CompiledProgram",
    "DonationError",
    "Drift",
    "DtypeAudit",
    "Flops",
    "ModelImplementations",
    "ModelSize",
    "ModelSummary",
    "audit_dtypes",
    "compiled",
    "count_flops",
    "drift",
    "implementations",
    "measure_size",
    "state_bytes",
    "summary",
]

_MOVED = {
    **{name: f"zoo.inspect.program.{name}" for name in ("CompileTimes", "Donation", "MemoryStats")},
    "DtypeGroup": "zoo.inspect.dtypes.DtypeGroup",
    "LayerDrift": "zoo.inspect.drift.LayerDrift",
    "LayerImplementation": "zoo.inspect.implementations.LayerImplementation",
}
"""Parts of results, by the paths of their files."""


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        # Not an AttributeError: `from zoo.inspect import name` would drop its words.
        raise ImportError(f"zoo.inspect.{name} has moved to {_MOVED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
