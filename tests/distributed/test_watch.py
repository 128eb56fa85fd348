"""What the processes of a program tell one another when one of them ends."""

import contextlib
import json
import os
import socket
import sys
import time

import pytest

from zoo.distributed import watch

NAMES = {0: "a (process 10)", 1: "b (process 11)", 2: "c (process 12)"}


@pytest.fixture
def statuses(monkeypatch):
    """Exit statuses with which a watch would have ended this process."""
    monkeypatch.setattr(watch, "_GRACE", 0.05)
    monkeypatch.setattr(watch, "_SAME_ERROR", 0.05)
    monkeypatch.setattr(watch.atexit, "register", lambda function: function)
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    return ended


@pytest.fixture
def start_watch():
    """Return a function that starts a watch and returns it with the other ends of its connections."""
    with contextlib.ExitStack() as opened:

        def start(process_id, *others):
            ours, theirs = {}, []
            with socket.create_server(("127.0.0.1", 0)) as server:
                for other in others:
                    theirs.append(opened.enter_context(socket.create_connection(server.getsockname(), timeout=10)))
                    ours[other] = server.accept()[0]
            made = watch.Watch(process_id, NAMES, ours, timeout=30)
            made.start()
            return made, theirs

        yield start


def read(connection):
    return json.loads(connection.makefile().readline())


def wait_for(statuses):
    give_up = time.monotonic() + 10
    while not statuses and time.monotonic() < give_up:
        time.sleep(0.01)


def close(*connections):
    for connection in connections:
        connection.close()


def test_first_process_passes_on_which_one_failed(start_watch, statuses, capsys):
    _, (first, second) = start_watch(0, 1, 2)
    first.sendall(b'{"failed": [1, "OSError: no ')
    first.sendall(b'room"]}\n{"odd\n')
    assert read(second) == {"failed": [1, "OSError: no room"]}
    close(first, second)
    wait_for(statuses)
    assert statuses == [1]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "process 1 on b (process 11) failed: OSError: no room"
    assert lines[1:] == ["  process 0 on a (process 10) ends with it"]


def test_connection_closed_without_a_word_is_a_death(start_watch, statuses, capsys):
    _, (first, second) = start_watch(0, 1, 2)
    second.close()
    assert read(first) == {"failed": [2, None]}
    first.close()
    wait_for(statuses)
    assert statuses == [1]
    assert "process 2 on c (process 12) ended without a word" in capsys.readouterr().err


def test_goodbye_is_no_death(start_watch, statuses):
    made, (coordinator,) = start_watch(1, 0)
    coordinator.sendall(b'{"left": true}\n')
    coordinator.shutdown(socket.SHUT_WR)
    assert coordinator.recv(1) == b""  # it has read both, and closed its end
    assert not made._failure.wait(0.3)
    assert statuses == []


def test_own_goodbye_is_the_end(start_watch, statuses):
    made, (coordinator,) = start_watch(1, 0)
    made._leave()
    assert read(coordinator) == {"left": True}
    coordinator.shutdown(socket.SHUT_WR)
    assert coordinator.recv(1) == b""
    assert not made._failure.wait(0.3)
    assert statuses == []


def test_error_that_the_end_of_another_causes_is_not_announced(start_watch, statuses, capsys):
    made, (coordinator,) = start_watch(1, 0)
    coordinator.sendall(b'{"failed": [2, null]}\n')
    assert made._failure.wait(10)
    sys.excepthook(OSError, OSError("connection closed by peer"), None)
    wait_for(statuses)
    assert statuses == [1]
    coordinator.settimeout(0.1)
    with pytest.raises(TimeoutError):
        coordinator.recv(1)
    assert "process 2 on c (process 12) ended without a word" in capsys.readouterr().err


@pytest.mark.parametrize("own", ["ValueError: wrong", "ValueError: other"])
def test_same_error_in_all_processes_is_printed_once(start_watch, statuses, capsys, own):
    made, (coordinator,) = start_watch(1, 0)
    made.announce_failure(own, status=2)
    assert read(coordinator) == {"failed": [1, own]}
    coordinator.sendall(b'{"failed": [0, "ValueError: wrong"]}\n')
    wait_for(statuses)
    assert statuses == [2]
    assert capsys.readouterr().err.count("ValueError: wrong") == (own != "ValueError: wrong")
