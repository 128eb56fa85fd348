"""What a compiled step costs: FLOPs, bytes, collectives by mesh axis, memory, donation, times.

Functions of a step and its arguments; models know nothing of them.
"""

from .collectives import Collective
from .operations import Flops, flops
from .program import Donation, DonationError, Memory, Program, Seconds, compiled
from .size import Size, size
from .state import state_bytes

__all__ = [
    "Collective",
    "Donation",
    "DonationError",
    "Flops",
    "Memory",
    "Program",
    "Seconds",
    "Size",
    "compiled",
    "flops",
    "size",
    "state_bytes",
]
