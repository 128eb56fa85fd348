"""Clusters in the environment of a process, and what is printed when a process is missing, killed or raises."""

import re
import signal
import socket
import subprocess
import sys

import jax
import pytest

import zoo
from tests.processes import make_environment
from zoo._processes import Cluster, find_cluster

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],big1",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x5)",
}
PLAIN = {"JAX_COORDINATOR_ADDRESS": "a:1234", "JAX_NUM_PROCESSES": "4"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # a batch script, not a step
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),  # a shell of salloc, in a job of 5 tasks
        (SLURM, Cluster("Slurm", None, 5, 3)),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "ib-gpu07:99"}, Cluster("Slurm", "ib-gpu07:99", 5, 3)),
        (PLAIN | {"JAX_PROCESS_ID": "2"}, Cluster("JAX's variables", "a:1234", 4, 2)),
        (PLAIN | {"JOB_COMPLETION_INDEX": "3"}, Cluster("JAX's variables", "a:1234", 4, 3)),
        (SLURM | PLAIN | {"JAX_PROCESS_ID": "2"}, Cluster("JAX's variables", "a:1234", 4, 2)),
        (
            PLAIN | {"JAX_PROCESS_ID": "2", "JAX_LOCAL_DEVICE_IDS": "4,5"},
            Cluster("JAX's variables", "a:1234", 4, 2, [4, 5]),
        ),
        (PLAIN | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None),
        ({"JOB_COMPLETION_INDEX": "3"}, None),  # an indexed Job with pods that work alone
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.0.0.1:34"}, Cluster("Open MPI", None, 2, 1)),
        (OPEN_MPI | {"JAX_COORDINATOR_ADDRESS": "a:5"}, Cluster("Open MPI", "a:5", 2, 1)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "JAX_COORDINATOR_ADDRESS": "a:5"}, Cluster("MPI", "a:5", 2, 1)),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, Cluster("Cloud TPU")),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1", "JAX_PLATFORMS": "cpu"}, None),
    ],
)
def test_environment_describes_the_cluster(environment, expected):
    assert find_cluster(environment) == expected


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0,1,2,3,4,5,6,7", [4, 5, 6, 7]), ("0,1", [1]), ("5", []), (None, [1])],
)
def test_tasks_of_a_node_share_its_devices(visible, expected):
    environment = SLURM | {"SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1,2(x2)"}
    cluster = find_cluster(environment | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {}))
    assert cluster is not None
    assert list(cluster.local_device_ids) == expected


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (PLAIN, "but not JOB_COMPLETION_INDEX"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "but not JAX_COORDINATOR_ADDRESS"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "but not JAX_NUM_PROCESSES"),
        (PLAIN | {"JAX_PROCESS_ID": "4"}, "numbered from 0 to 3"),
        (PLAIN | {"JAX_PROCESS_ID": "one"}, "JAX_PROCESS_ID='one': expected a number"),
        (PLAIN | {"JAX_PROCESS_ID": "0", "JAX_COORDINATOR_ADDRESS": "a"}, "HOST:PORT"),
        (OPEN_MPI, "mpirun -x JAX_COORDINATOR_ADDRESS"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "MPI started 2 processes, and does not say where the first one runs"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(x5)", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "cannot share 4"),
    ],
)
def test_incomplete_environment_is_refused(environment, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        find_cluster(environment)


def test_late_call_is_refused(monkeypatch):
    jax.devices()
    for name, value in (PLAIN | {"JAX_PROCESS_ID": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="must be called before any JAX calls"):
        zoo.parallel.initialize()


PROGRAM = """
import os
import signal
import sys
import time
from dataclasses import dataclass

import jax
from jax.experimental import multihost_utils

import zoo
from zoo import train


@dataclass(frozen=True)
class Config:
    end: str = "none"


def main(config):
    end = config.end
    multihost_utils.sync_global_devices("here")
    print("met", jax.process_index(), jax.process_count(), flush=True)
    if jax.process_index() == 1:
        if end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "raise":
            raise ValueError("no such file on this host")
        if end == "break":
            {}["key"]
    if end == "kill":
        time.sleep(60)  # as one on GPUs, whose collectives wait for the others
    if end != "none":
        multihost_utils.sync_global_devices("there")


zoo.parallel.initialize(timeout=int(sys.argv.pop()), heartbeat=10)
zoo.parallel.initialize()
train.run_cli(main, Config)
"""


def find_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(folder, index, port, end="none", *, count=2, timeout=60):
    path = folder / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    place = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    return subprocess.Popen(
        [sys.executable, str(path), "--end", end, str(timeout)],
        env=make_environment(1, **place),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*processes, timeout=58):
    """Return (output, errors, exit status) of each process."""
    results = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=timeout)
            results.append((output, errors, process.returncode))
    finally:
        for process in processes:
            process.kill()
    return results


@pytest.mark.slow  # tests/train/test_moving_between_processes.py: both end with status 0
def test_processes_that_meet_end_with_status_0(tmp_path):
    port = find_port()
    results = finish(start(tmp_path, 0, port), start(tmp_path, 1, port))
    assert [status for _, _, status in results] == [0, 0]
    assert "2 processes, found by JAX's variables\n" in results[0][1]


@pytest.mark.ci
def test_processes_end_if_one_does_not_come(tmp_path):
    port = find_port()
    results = finish(*(start(tmp_path, index, port, count=3, timeout=6) for index in (0, 2)))
    for index, (output, errors, status) in zip((0, 2), results, strict=True):
        assert (output, status) == ("", 1)
        assert errors.startswith(
            f"error: process {index} of 3 has waited 6 s at 127.0.0.1:{port} for processes that did not come."
        )
        assert errors.count("\n") == 1, errors


@pytest.mark.ci
def test_process_that_is_killed_ends_the_other(tmp_path):
    port = find_port()
    (output, errors, status), (_, _, killed) = finish(*(start(tmp_path, index, port, "kill") for index in range(2)))
    assert output.endswith("met 0 2\n")  # Gloo, too, prints a line
    assert killed == -signal.SIGKILL
    assert status == -signal.SIGABRT
    assert "unhealthy (stopped sending heartbeats):\n1\n" in errors


def test_process_that_raises_ends_without_waiting(tmp_path):
    port = find_port()
    (_, other_errors, other), (output, errors, status) = finish(
        *(start(tmp_path, index, port, "raise") for index in range(2))
    )
    assert output.endswith("met 1 2\n")
    assert (other, status) == (1, 2)
    assert errors == "program.py: error in process 1 of 2: no such file on this host\n"
    assert other_errors.endswith(
        "process 0 of 2 ends with this error. If another process failed first, its log has the cause\n"
    )


@pytest.mark.slow  # as the one before, with a traceback
def test_process_with_a_bug_prints_its_traceback(tmp_path):
    port = find_port()
    (_, _, other), (_, errors, status) = finish(*(start(tmp_path, index, port, "break") for index in range(2)))
    assert (other, status) == (1, 1)
    assert "Traceback" in errors and "KeyError: 'key'\nprocess 1 of 2 ends with this error." in errors
