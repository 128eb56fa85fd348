"""Processes that meet, and what is said when one of them is missing, comes twice, or ends."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from zoo.distributed import initialize

ROOT = Path(__file__).parents[2]
PLAIN = {"JAX_COORDINATOR_ADDRESS": "a:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "1"}
PROGRAM = """
import sys
import zoo
try:
    zoo.distributed.initialize(timeout=6, heartbeat=10)
    zoo.distributed.initialize()
except (OSError, ValueError) as error:
    print(type(error).__name__, error)
    sys.exit(3)
import jax
from jax.experimental import multihost_utils
multihost_utils.sync_global_devices("here")
print("met", jax.process_index(), jax.process_count(), zoo.distributed.is_first_process(), flush=True)
if sys.argv[1:]:
    import os, time
    if jax.process_index() == 1:
        if sys.argv[1] == "die":
            os._exit(9)
        raise ValueError("no such file on this host")
    time.sleep(60)
"""


def start(index, port, *words, count=2):
    place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}
    environment = os.environ | place | {"JAX_PROCESS_ID": str(index), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *words], cwd=ROOT, env=environment, **pipes)


def find_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_late_call_is_refused(monkeypatch):
    jax.devices()
    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="already run a computation"):
        initialize()


def run_all(*processes, timeout=58):
    """Return (output, errors, exit status) of each process."""
    results = []
    for process in processes:
        with process:
            results.append((*process.communicate(timeout=timeout), process.returncode))
    return results


@pytest.mark.slow  # test_end_of_one_process_ends_the_others: they meet; tests/train/test_moving_...: both end with 0
def test_processes_that_meet_end_with_status_0():
    port = find_port()
    assert [result[2] for result in run_all(start(0, port), start(1, port))] == [0, 0]


def test_missing_process_is_named():
    port = find_port()  # number 1 of three does not come
    (output, _, status), other = run_all(start(0, port, count=3), start(2, port, count=3))
    assert "TimeoutError 1 of 3 processes did not come to 127.0.0.1" in output
    assert "number 1. Here are 0 on" in output
    assert (other[0], other[2]) == (output, status) == (output, 3)


@pytest.mark.slow
def test_number_that_comes_twice_is_named():
    port = find_port()
    results = run_all(*(start(index, port, count=3) for index in (0, 1, 1)))
    assert all("ValueError two processes call themselves number 1" in output for output, _, _ in results)


def test_end_of_one_process_ends_the_others():
    killed, failed, began = find_port(), find_port(), time.monotonic()
    pairs = [start(index, port, word) for port, word in ((killed, "die"), (failed, "raise")) for index in range(2)]
    results = run_all(*pairs)
    for number, (output, _, _) in enumerate(results):  # they have met; Gloo, too, prints a line
        assert output.endswith(("met 0 2 True\n", "met 1 2 False\n")[number % 2]), output
    (_, errors, status), (_, _, died), (_, told, other), (_, own, raised) = results
    assert (died, status, raised, other) == (9, 1, 1, 1)
    assert time.monotonic() - began < 58
    names = [f"process 1 on {socket.gethostname()} (process {pair.pid})" for pair in (pairs[1], pairs[3])]
    assert f"2 processes, found by JAX's variables: 0 on {socket.gethostname()}" in errors
    assert f"{names[0]} ended without a word" in errors, errors
    assert f"{names[1]} failed: ValueError: no such file on this host" in told, told
    assert own.endswith("ValueError: no such file on this host\n"), own  # not buried under what JAX says of it
