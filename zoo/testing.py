"""Checks of mixers and of ported families: `zoo.tools.testing` by its promised name."""

from .tools.testing import Check, check_family, check_mixer
from .tools.testing.checks import CheckReport, Difference

__all__ = ["Check", "CheckReport", "Difference", "check_family", "check_mixer"]
