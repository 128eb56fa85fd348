"""HTML reports on runs, with charts by matplotlib."""

from .charts import Chart, Curve, ImageGrid, LineChart, LoadChart, Picture, ScatterChart, draw_svg
from .page import ParameterRow, redraw_report, write_report
from .parameters import describe_model, tabulate_parameters
from .runs import report_run, report_runs

__all__ = [
    "Chart",
    "Curve",
    "ImageGrid",
    "LineChart",
    "LoadChart",
    "ParameterRow",
    "Picture",
    "ScatterChart",
    "describe_model",
    "draw_svg",
    "redraw_report",
    "report_run",
    "report_runs",
    "tabulate_parameters",
    "write_report",
]
