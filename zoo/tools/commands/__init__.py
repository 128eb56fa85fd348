"""The commands of `zoo` that plan, draw, compare and evaluate."""

from .draw import draw
from .evaluate import evaluate
from .parity import parity
from .plan import plan

__all__ = ["draw", "evaluate", "parity", "plan"]
