"""Rendezvous of a cluster's processes before JAX starts: each learns the names of all, or which ones are missing.

JAX's own client ends the process from C++ when another one is missing, and does not say where those that came are.
"""

import json
import os
import socket
import time
from collections.abc import Mapping

from .clusters import Cluster

_RETRY = 0.2  # seconds


def meet(cluster: Cluster, timeout: int) -> dict[int, str]:
    """Wait for all processes at the coordinator's port; return their names by number.

    **Raises** `TimeoutError` in each process that came if others did not within `timeout` seconds; `ValueError` if two
    have one number; `OSError` if the port cannot be opened.
    """
    host, port = cluster.coordinator.rsplit(":", 1)
    name = f"{socket.gethostname()} (process {os.getpid()})"
    if cluster.process_id == 0:
        answer = _gather(int(port), cluster.num_processes, name, time.monotonic() + timeout)
    else:
        answer = _report(host.strip("[]"), int(port), cluster, name, time.monotonic() + timeout)
    names = {int(index): name for index, name in answer["names"].items()}
    if answer["twice"]:
        raise ValueError(
            f"two processes call themselves number {answer['twice'][0]}: {answer['twice'][1]}, and another; give each "
            f"its own, from 0 to {cluster.num_processes - 1}"
        )
    missing = [str(index) for index in range(cluster.num_processes) if index not in names]
    if missing:
        raise TimeoutError(
            f"{len(missing)} of {cluster.num_processes} processes did not come to {cluster.coordinator} within "
            f"{timeout} s: number {', '.join(missing)}. Here are {describe_names(names)}. Look at the logs of those "
            "that are missing, and whether their nodes reach that port"
        )
    return names


def _gather(port: int, count: int, name: str, deadline: float) -> dict:
    """Collect the names of the other processes as they connect, then tell them all of them."""
    names, connections, twice = {0: name}, [], None
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
            names[index] = names.get(index, other)
            connections.append(connection)
    answer = {"names": names, "twice": twice}
    for connection in connections:
        with connection:
            try:
                connection.sendall(json.dumps(answer).encode() + b"\n")
            except OSError:
                continue  # it died since; the heartbeat will tell
    return answer


def _read_introduction(connection: socket.socket) -> tuple[int, str]:
    index, name = json.loads(connection.makefile().readline())
    return int(index), str(name)


def _report(host: str, port: int, cluster: Cluster, name: str, deadline: float) -> dict:
    """Tell the coordinator this process's name, as soon as it is there; return what it answers."""
    reason = "no answer"
    while (left := deadline + 10 - time.monotonic()) > 0:  # the coordinator's own deadline, and its answer on the way
        try:
            with socket.create_connection((host, port), timeout=min(left, 10)) as connection:
                connection.sendall(json.dumps([cluster.process_id, name]).encode() + b"\n")
                connection.settimeout(left)
                line = connection.makefile().readline()
            if line:
                return json.loads(line)
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
