"""Rendezvous of a cluster's processes before JAX starts: each learns the names of all, or which ones are missing.

JAX's own client ends the process from C++ when another one is missing, and does not say where those that came are.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from .clusters import Cluster

_RETRY = 0.2  # seconds


def meet(cluster: Cluster, timeout: int) -> tuple[dict[int, str], dict[int, socket.socket]]:
    """Wait for all processes at the coordinator's port. Return their names by number, and open connections: those of
    process 0 with all others, and that of another one with process 0.

    **Raises** `TimeoutError` in each process that came if others did not within `timeout` seconds; `ValueError` if two
    have one number; `OSError` if the port cannot be opened.
    """
    host, port = cluster.coordinator.rsplit(":", 1)
    name = f"{socket.gethostname()} (process {os.getpid()})"
    if cluster.process_id == 0:
        answer, connections = _gather(int(port), cluster.num_processes, name, time.monotonic() + timeout)
    else:
        answer, connection = _report(host.strip("[]"), int(port), cluster, name, time.monotonic() + timeout)
        connections = {0: connection}
    names = {int(index): name for index, name in answer["names"].items()}
    missing = [str(index) for index in range(cluster.num_processes) if index not in names]
    if answer["twice"] or missing:
        for connection in connections.values():
            connection.close()
    if answer["twice"]:
        raise ValueError(
            f"two processes call themselves number {answer['twice'][0]}: {answer['twice'][1]}, and another; give each "
            f"its own, from 0 to {cluster.num_processes - 1}"
        )
    if missing:
        raise TimeoutError(
            f"{len(missing)} of {cluster.num_processes} processes did not come to {cluster.coordinator} within "
            f"{timeout} s: number {', '.join(missing)}. Here are {describe_names(names)}. Look at the logs of those "
            "that are missing, and whether their nodes reach that port"
        )
    return names, connections


def _gather(port: int, count: int, name: str, deadline: float) -> tuple[dict[str, Any], dict[int, socket.socket]]:
    """Collect the names of the other processes as they connect, then tell them all of them."""
    names, connections, twice = {0: name}, {}, None
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=count)
    except OSError as error:
        raise OSError(
            f"port {port} of {socket.gethostname()}, where the processes meet, cannot be opened ({error.strerror}): "
            "choose another one with JAX_COORDINATOR_ADDRESS or JAX_COORDINATOR_PORT"
        ) from error
    with server:
        while len(names) < count and twice is None and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                connection, _ = server.accept()
            except TimeoutError:
                break
            connection.settimeout(10)
            try:
                index, other = _read_introduction(connection)
            except (OSError, ValueError, TypeError):
                connection.close()  # not one of ours: a port scanner, or a process that died here
                continue
            twice = [index, other] if index in names else None
            if twice is None:
                names[index] = other
            connections[count if twice else index] = connection
    answer = {"names": names, "twice": twice}
    for connection in connections.values():
        with contextlib.suppress(OSError):  # it died since, which is noticed later
            connection.sendall(json.dumps(answer).encode() + b"\n")
    return answer, connections


def _read_introduction(connection: socket.socket) -> tuple[int, str]:
    index, name = json.loads(_read_line(connection))
    return int(index), str(name)


def _read_line(connection: socket.socket) -> bytes:
    """Read up to the end of a line, and nothing behind it; an incomplete line if the connection closes."""
    line = b""
    while not line.endswith(b"\n") and (seen := connection.recv(65536, socket.MSG_PEEK)):
        line += connection.recv(seen.find(b"\n") + 1 or len(seen))
    return line


def _report(host: str, port: int, cluster: Cluster, name: str, deadline: float) -> tuple[dict[str, Any], socket.socket]:
    """Tell the coordinator this process's name, as soon as it is there; return its answer and the connection."""
    reason = "no answer"
    while (left := deadline + 10 - time.monotonic()) > 0:  # the coordinator's own deadline, and its answer on the way
        with contextlib.ExitStack() as exits:
            try:
                connection = exits.enter_context(socket.create_connection((host, port), timeout=min(left, 10)))
                connection.sendall(json.dumps([cluster.process_id, name]).encode() + b"\n")
                connection.settimeout(left)
                if line := _read_line(connection):
                    answer = json.loads(line)
                    exits.pop_all()
                    return answer, connection
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error)
        time.sleep(_RETRY)
    raise TimeoutError(
        f"process {cluster.process_id} of {cluster.num_processes} did not reach process 0 at {cluster.coordinator} "
        f"({reason}): look at its log, and whether this node reaches that port"
    )


def describe_names(names: Mapping[int, str], most: int = 8) -> str:
    """Return "0 on HOST (process 17), 1 on ...", shortened after `most` processes."""
    words = [f"{index} on {names[index]}" for index in sorted(names)]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
