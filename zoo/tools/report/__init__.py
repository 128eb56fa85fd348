"""HTML reports on runs, with charts by matplotlib."""

from .charts import Curve, ImageGrid, LineChart, Picture, ScatterChart
from .page import write_report
from .parameters import describe_model, tabulate_parameters

__all__ = [
    "Curve",
    "ImageGrid",
    "LineChart",
    "Picture",
    "ScatterChart",
    "describe_model",
    "tabulate_parameters",
    "write_report",
]
