"""Checks of mixers and of ported families: promised properties, and faults that a loss does not show."""

from .checks import Check
from .family import check_family
from .mixer import check_mixer

__all__ = ["Check", "check_family", "check_mixer"]
