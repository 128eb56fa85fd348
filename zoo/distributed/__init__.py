"""Programs on several processes: finds the cluster, waits for all processes, and names one that is missing or fails."""

from .start import announce_failure, count_processes, initialize, is_first_process

__all__ = ["announce_failure", "count_processes", "initialize", "is_first_process"]
