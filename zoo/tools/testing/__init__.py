"""Checks of mixers and of ported families: promised properties, and faults that a loss does not show."""

from .family import check_family
from .mixer import check_mixer
from .report import Check, CheckReport, Difference

__all__ = ["Check", "CheckReport", "Difference", "check_family", "check_mixer"]
