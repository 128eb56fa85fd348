"""Checks of mixers and of ported families: what they promise, and what an author cannot see in a loss."""

from .family import check_family
from .mixer import check_mixer
from .report import Check, CheckReport, Difference

__all__ = ["Check", "CheckReport", "Difference", "check_family", "check_mixer"]
