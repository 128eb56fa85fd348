"""Programs on several processes: finds the cluster, waits for every process, and names those that are missing."""

from .start import initialize, is_first_process

__all__ = ["initialize", "is_first_process"]
