"""Checks of mixers and of ported families: what they promise, and what an author cannot see in a loss."""

from .mixer import check_mixer
from .report import Check, CheckReport, Difference

__all__ = ["Check", "CheckReport", "Difference", "check_mixer"]
