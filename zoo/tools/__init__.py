"""Tools that look at models and runs: plan, draw, export, compare, check, evaluate, report.

Training and loading import none of them.

from zoo import tools
tools.report_run(run, "A Transformer from scratch", model)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import draw as draw
    from . import evaluate as evaluate
    from . import export as export
    from . import parity as parity
    from . import plan as plan
    from . import report as report
    from . import testing as testing
    from .report.runs import report_run as report_run
    from .report.runs import report_runs as report_runs

__all__ = ["draw", "evaluate", "export", "parity", "plan", "report", "report_run", "report_runs", "testing"]


def __getattr__(name: str) -> Any:
    """Import a tool at first use: a program seldom needs several."""
    if name in ("report_run", "report_runs"):
        return getattr(importlib.import_module(f"{__name__}.report.runs"), name)
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
