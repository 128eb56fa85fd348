"""Recurrences as Pallas kernels for TPUs, interpreted on a CPU."""

from . import common as common
from . import delta_rule as delta_rule
from . import gated_linear as gated_linear
