"""Checks of mixers and of ported families: `zoo.tools.testing` by its promised name."""

from .tools.testing import Check, CheckReport, Difference, check_family, check_mixer

__all__ = ["Check", "CheckReport", "Difference", "check_family", "check_mixer"]
