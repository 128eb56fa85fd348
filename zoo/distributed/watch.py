"""Watch over the processes of a program: when one of them fails, all say which one, and end within seconds.

Each process keeps its connection with process 0 from the rendezvous to its end. A connection that closes without a word
tells of a process that was killed, one on which nothing answers of a lost host, and a process that ends by an exception
sends its text. JAX notices the end of a process later, gives its number alone, and waits for one that failed.
"""

import atexit
import contextlib
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Mapping

from zoo._terminal import show_error

_GRACE = 5.0  # seconds that a process has to end by itself
_SAME_ERROR = 1.0  # seconds within which all processes raise what is wrong in all, or what the end of one causes
_LONGEST = 2000  # characters of a reason
_LEFT = b'{"left": true}\n'


class Watch:
    """Connections of process 0 with all others, or of one of these with process 0, and a thread that reads them.

    - `names`: of all processes, by number; `connections`: by the number of the process at the other end.
    - `timeout`: seconds after which a host that does not answer is lost.
    """

    def __init__(
        self, process_id: int, names: Mapping[int, str], connections: Mapping[int, socket.socket], timeout: int
    ):
        self._process_id = process_id
        self._names = names
        self._open = dict(connections)
        self._left: set[int] = set()
        self._failure = threading.Event()
        self._own_reason: str | None = None
        self._status = 0
        self._pid = os.getpid()
        for connection in connections.values():
            _keep_alive(connection, timeout)

    def start(self) -> None:
        """Start the thread; from now on the end of this process is told to the others, with its exception if any."""
        threading.Thread(target=self._read, name="watch", daemon=True).start()
        atexit.register(self._leave)
        before = sys.excepthook

        def announce(kind, error, trace):
            before(kind, error, trace)
            self.announce_failure(f"{kind.__name__}: {error}")

        sys.excepthook = announce

    def announce_failure(self, reason: str, status: int = 1) -> None:
        """Tell the others that this process ends, and why. It then ends with `status`, without waiting for them."""
        self._own_reason, self._status = reason[:_LONGEST], status
        if not self._failure.wait(_SAME_ERROR / 2):  # it may be the end of another one that made this one fail
            self._send({"failed": [self._process_id, self._own_reason]})

    def _send(self, message: Mapping, *, but: int | None = None) -> None:
        for index, connection in list(self._open.items()):
            if index != but:
                _send_line(connection, json.dumps(message).encode() + b"\n")

    def _read(self) -> None:
        """Read until all connections are closed."""
        buffers = dict.fromkeys(self._open, b"")
        with selectors.DefaultSelector() as selector:
            for index, connection in self._open.items():
                connection.settimeout(10)
                selector.register(connection, selectors.EVENT_READ, index)
            while self._open:
                for key, _ in selector.select():
                    index = key.data
                    try:
                        received = self._open[index].recv(4096)
                    except OSError:  # reset, or nothing has answered for too long
                        received = b""
                    if not received:
                        selector.unregister(key.fileobj)
                        self._open.pop(index).close()
                        if index not in self._left:
                            self._end(index, None)
                    *lines, buffers[index] = (buffers[index] + received).split(b"\n")
                    for line in lines:
                        self._handle(index, line)

    def _handle(self, index: int, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return
        self._left.add(index)
        if failed := message.get("failed"):
            self._end(*failed)

    def _end(self, index: int, reason: str | None) -> None:
        """End this process, because process `index` failed: for `reason`, or without a word."""
        if self._failure.is_set():
            return
        self._failure.set()
        if self._process_id == 0:
            self._send({"failed": [index, reason]}, but=index)
        threading.Thread(target=self._say_and_end, args=(index, reason), daemon=True).start()

    def _say_and_end(self, index: int, reason: str | None) -> None:
        if reason is not None:
            time.sleep(_SAME_ERROR)
        if reason is None or reason != self._own_reason:
            end = "ended without a word: look at its log, and whether its host ran out of memory or was lost"
            show_error(
                f"process {index} on {self._names.get(index, 'an unknown host')} "
                f"{end if reason is None else f'failed: {reason}'}\nprocess {self._process_id} on "
                f"{self._names[self._process_id]} ends with it"
            )
        time.sleep(_GRACE)
        self._exit()

    def _leave(self) -> None:
        """Say goodbye as the interpreter ends. After a failure, end here: JAX would wait for the other processes."""
        if os.getpid() != self._pid:
            return  # a fork
        if self._status:
            if self._failure.wait(_SAME_ERROR):
                time.sleep(2 * _GRACE)  # the thread ends the process, once it has said why
            self._exit()
        self._left |= self._open.keys()
        for connection in list(self._open.values()):
            _send_line(connection, _LEFT)

    def _exit(self) -> None:
        """End this process, process 0 after the others: JAX aborts those whose coordinator has gone."""
        give_up = time.monotonic() + 2 * _GRACE
        while self._process_id == 0 and self._open and time.monotonic() < give_up:
            time.sleep(0.05)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(self._status or 1)


def _send_line(connection: socket.socket, line: bytes) -> None:
    with contextlib.suppress(OSError):  # its end is noticed by the thread
        connection.sendall(line)


def _keep_alive(connection: socket.socket, timeout: int) -> None:
    """Let the kernel probe the other host, so that one without power or network is lost within `timeout` seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", timeout // 3), ("TCP_KEEPINTVL", timeout // 6), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), max(value, 1))
