"""HTML reports on runs, with charts by matplotlib."""

from typing import TYPE_CHECKING

from zoo._moved import explain_moved_names

from .charts import Curve, ImageGrid, LineChart, Picture, ScatterChart
from .page import redraw_report, write_report
from .parameters import describe_model, tabulate_parameters
from .runs import report_run, report_runs

__all__ = [
    "Curve",
    "ImageGrid",
    "LineChart",
    "Picture",
    "ScatterChart",
    "describe_model",
    "redraw_report",
    "report_run",
    "report_runs",
    "tabulate_parameters",
    "write_report",
]

_MOVED = {
    **{name: f"zoo.tools.report.charts.{name}" for name in ("Chart", "LoadChart", "draw_svg")},
    "ParameterRow": "zoo.tools.report.page.ParameterRow",
}
if not TYPE_CHECKING:  # for a type checker every name would be an attribute
    __getattr__ = explain_moved_names(__name__, _MOVED)
