"""Costs of a compiled step: FLOPs, memory traffic, collectives by mesh axis, memory, buffer donation, compile times.

Functions of a step and its arguments; models do not depend on them.
"""

from .collectives import Collective
from .drift import Drift, LayerDrift, drift
from .dtypes import DtypeAudit, DtypeGroup, audit_dtypes
from .implementations import LayerImplementation, ModelImplementations, implementations
from .operations import Flops, count_flops
from .parameters import ModelSummary, ParameterSummary, summary
from .program import CompiledProgram, CompileTimes, Donation, DonationError, MemoryStats, compiled
from .size import ModelSize, measure_size
from .state import state_bytes

__all__ = [
    "Collective",
    "CompileTimes",
    "CompiledProgram",
    "Donation",
    "DonationError",
    "Drift",
    "DtypeAudit",
    "DtypeGroup",
    "Flops",
    "LayerDrift",
    "LayerImplementation",
    "MemoryStats",
    "ModelImplementations",
    "ModelSize",
    "ModelSummary",
    "ParameterSummary",
    "audit_dtypes",
    "compiled",
    "count_flops",
    "drift",
    "implementations",
    "measure_size",
    "state_bytes",
    "summary",
]
