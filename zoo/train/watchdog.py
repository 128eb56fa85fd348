"""Stacks of a run that stands still: where each thread waits, without a debugger."""

import faulthandler
import sys
import threading
from pathlib import Path
from typing import TextIO

from zoo._terminal import show


class Watchdog:
    """Dump the stacks of all threads once `seconds` pass without a call of `restart`; the program goes on.

        with Watchdog(folder / "stacks-0.log", 300) as watchdog:
            for step in range(steps):
                watchdog.restart()
                ...

    Python's `faulthandler` writes them to the file, from a thread that does not need the interpreter's lock, and then
    they are printed to stderr. One dump for each time it stands still. Without any, no file is left.
    """

    def __init__(self, path: Path, seconds: float | int):
        if seconds <= 0:
            raise ValueError(f"watchdog={seconds}: give a positive number of seconds")
        self._path = path
        self._seconds = seconds
        self._timer: threading.Timer | None = None

    def __enter__(self) -> "Watchdog":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", encoding="utf-8")
        self.restart()
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel()
        self._file.close()
        if self._path.stat().st_size == 0:
            self._path.unlink()

    def restart(self) -> None:
        """Count the seconds from now."""
        self._cancel()
        faulthandler.dump_traceback_later(self._seconds, file=self._file)
        self._timer = threading.Timer(self._seconds, _show, [self._seconds, self._path, sys.__stderr__])
        self._timer.daemon = True
        self._timer.start()

    def _cancel(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()


def _show(seconds: float | int, path: Path, stderr: TextIO) -> None:
    show(f"no step for {seconds} s; stacks of all threads, also in {path}:", file=stderr)
    faulthandler.dump_traceback(file=stderr)
