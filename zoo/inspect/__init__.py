"""Costs of a compiled step: FLOPs, memory traffic, collectives by mesh axis, memory, buffer donation, compile times.

Functions of a step and its arguments, and summaries of a model; models do not depend on them.
"""

from .drift import drift
from .dtypes import audit_dtypes
from .implementations import implementations
from .operations import count_flops
from .program import compiled
from .size import measure_size
from .state import state_bytes
from .traces import merge_traces

__all__ = [
    "audit_dtypes",
    "compiled",
    "count_flops",
    "drift",
    "implementations",
    "measure_size",
    "merge_traces",
    "state_bytes",
]
