"""Graceful shutdown: signal handlers set a flag, which the loop reads after the step.

Raising instead, between the dispatch of a step and the rebinding of its results, would leave a donated model deleted.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import jax
import numpy as np


class Interrupt:
    """Context manager in which SIGINT and SIGTERM set `requested`; a second SIGINT raises `KeyboardInterrupt`.

        with Interrupt() as interrupt:
            for step in range(steps):
                ...
                if interrupt.requested:
                    save and break

    Restores the previous handlers on exit. Does nothing outside the main thread, where Python allows no handlers.
    `ended_by_sigterm` tells whether one was left after a request that was not Ctrl-C's, in this process or another.
    """

    ended_by_sigterm = False

    def __init__(self):
        self.requested = False
        self._number: int = signal.SIGTERM
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            if handler is None:
                handler = signal.SIG_DFL
            signal.signal(number, handler)
        self._before.clear()
        if self.requested and self._number == signal.SIGTERM:
            Interrupt.ended_by_sigterm = True

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        self._number = number


def is_set_on_any_process(flag: bool) -> bool:
    """Return True if `flag` is set on any process. A collective: all processes call it at the same step."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))
