"""The commands of `zoo` that plan, draw, compare, evaluate and report."""

from .draw import draw
from .evaluate import evaluate
from .parity import parity
from .plan import plan
from .report import report

__all__ = ["draw", "evaluate", "parity", "plan", "report"]
