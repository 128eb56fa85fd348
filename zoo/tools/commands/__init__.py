"""The commands of `zoo` that plan, draw, compare, evaluate, export and report."""

from .draw import draw
from .evaluate import evaluate
from .export import export
from .parity import parity
from .plan import plan
from .report import report

__all__ = ["draw", "evaluate", "export", "parity", "plan", "report"]
