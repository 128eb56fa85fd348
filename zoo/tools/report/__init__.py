"""HTML reports on runs, with charts by matplotlib."""

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
