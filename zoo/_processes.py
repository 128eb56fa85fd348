"""Start JAX on the processes of a cluster, and end one that fails without waiting for the others."""

import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import jax
from jax._src.distributed import global_state

from ._terminal import show, show_error


@dataclass(frozen=True)
class Cluster:
    """Arguments of `jax.distributed.initialize`. JAX finds what is None; no device ids stand for all devices."""

    source: str
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: Sequence[int] = ()


def initialize(*, timeout: int = 300, heartbeat: int = 30) -> None:
    """Connect the processes of a program with `jax.distributed.initialize`. Does nothing outside of a cluster.

    Looks, in this order, for

    - `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` (or `JOB_COMPLETION_INDEX`, which Kubernetes
      sets in an indexed Job and in a JobSet);
    - Open MPI, Slurm (a step of `srun` with more than one task), MPICH and Intel MPI. Open MPI 5, MPICH and Intel MPI
      need `JAX_COORDINATOR_ADDRESS` too;
    - Cloud TPU, of one slice or several.

    Call it before the first computation; recipes do, through `train.run_cli`. A second call does nothing. A process
    that waits longer than `timeout` seconds for another one prints an error and ends. JAX ends all processes when it
    has not heard of one of them for `heartbeat` seconds; one that raises waits for the others for twice as long, but
    ends at once in `train.run_cli`. One task per node gets all of its GPUs, several tasks share them in equal parts;
    `JAX_LOCAL_DEVICE_IDS` overrides that.

    **Raises** `ValueError` for an environment that is incomplete or contradicts itself, and `RuntimeError` if JAX has
    already run a computation.
    """
    if jax.distributed.is_initialized():
        return
    cluster = find_cluster(os.environ)
    if cluster is None:
        return
    give_up = threading.Timer(timeout, _give_up, [timeout])
    give_up.daemon = True
    give_up.start()
    try:
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.num_processes,
            cluster.process_id,
            local_device_ids=cluster.local_device_ids,  # with None, JAX gives a task alone on its node one GPU
            initialization_timeout=timeout + 60,  # after ours: JAX aborts, with a stack of C++
            heartbeat_timeout_seconds=heartbeat,
            shutdown_timeout_seconds=2 * heartbeat,
        )
    finally:
        give_up.cancel()
    if is_first_process() and count_processes() > 1:
        show(f"{count_processes()} processes, found by {cluster.source}", file=sys.stderr)


def is_first_process() -> bool:
    """Return True in process 0. Starts no backend, as `jax.process_index` does."""
    return global_state.process_id in (None, 0)


def count_processes() -> int:
    """Return the number of processes. Starts no backend, as `jax.process_count` does."""
    return global_state.num_processes or 1


def name_process() -> str:
    """Return "process 1 of 4", counted from 0."""
    return f"process {global_state.process_id or 0} of {count_processes()}"


def end_process(status: int) -> NoReturn:
    """End this process at once. At a normal exit JAX waits for all other processes, and then aborts."""
    if is_first_process():
        time.sleep(5)  # JAX aborts the others as soon as it has gone: they may have an error to print
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _give_up(timeout: int) -> None:
    show_error(
        f"error: {name_process()} has waited {timeout} s at {global_state.coordinator_address} for processes that did "
        "not come. Look at their logs, and whether their nodes reach that address"
    )
    end_process(1)


_LAUNCHERS = {
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "Slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    "MPI": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
}
"""Variables that hold the number of processes, the index of this one, and its index on its node."""


def find_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """Return the cluster that the environment describes, or None for a process on its own.

    **Raises** `ValueError` for an environment that is incomplete or contradicts itself.
    """
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    source = _find_launcher(environment)
    local_index, neighbors = 0, 1
    if "JAX_NUM_PROCESSES" in environment or (source is None and address is not None):
        source = "JAX's variables"
        count_name = "JAX_NUM_PROCESSES"
        if "JAX_PROCESS_ID" in environment:
            index_name = "JAX_PROCESS_ID"
        else:
            index_name = "JOB_COMPLETION_INDEX"
        _require_all(environment, ("JAX_COORDINATOR_ADDRESS", count_name, index_name))
    elif source is not None:
        count_name, index_name, local_name = _LAUNCHERS[source]
        local_index = _read_number(environment, local_name, default=0)
        neighbors = _count_neighbors(environment, source)
        if address is None and source != "Slurm" and "OMPI_MCA_orte_hnp_uri" not in environment:
            raise ValueError(
                f"{source} started {environment[count_name]} processes, and does not say where the first one runs: "
                "pass JAX_COORDINATOR_ADDRESS=HOST:PORT of its node to all of them "
                "(mpirun -x JAX_COORDINATOR_ADDRESS=...)"
            )
    elif _is_tpu_host(environment):
        return Cluster("Cloud TPU")
    else:
        return None
    count = _read_number(environment, count_name)
    index = _read_number(environment, index_name)
    if index >= count:
        raise ValueError(
            f"{source} says that this is process {index} of {count}: processes are numbered from 0 to {count - 1}"
        )
    if address is not None and not re.fullmatch(r".+:\d+", address):
        raise ValueError(f"JAX_COORDINATOR_ADDRESS={address!r}: expected HOST:PORT, as in node-0:61440")
    if count == 1:
        return None
    return Cluster(source, address, count, index, _assign_devices(environment, local_index, neighbors))


def _find_launcher(environment: Mapping[str, str]) -> str | None:
    """Return the launcher that started more than one process.

    The count of a Slurm step is read. The count of the job is set in a batch script and in a shell of `salloc` too.
    """
    for launcher, (count, index, _) in _LAUNCHERS.items():
        if index in environment and _read_number(environment, count, default=1) > 1:
            return launcher
    return None


def _require_all(environment: Mapping[str, str], names: Sequence[str]) -> None:
    given = [name for name in names if name in environment]
    missing = [name for name in names if name not in environment]
    if missing:
        raise ValueError(f"{', '.join(given)} is set, but not {', '.join(missing)}: set all three, or none")


def _count_neighbors(environment: Mapping[str, str], launcher: str) -> int:
    """Return the number of processes on this node."""
    if launcher == "Open MPI":
        return _read_number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", default=1)
    if launcher == "MPI":
        return _read_number(environment, "MPI_LOCALNRANKS", default=1)
    return _count_slurm_tasks(environment)


def _assign_devices(environment: Mapping[str, str], local_index: int, neighbors: int) -> Sequence[int]:
    """Return the indices of this process's GPUs among the visible ones, or none for all of them."""
    given = environment.get("JAX_LOCAL_DEVICE_IDS")
    if given:
        if not re.fullmatch(r"\d+(,\d+)*", given):
            raise ValueError(f"JAX_LOCAL_DEVICE_IDS={given!r}: expected numbers, as in 0,1")
        return [int(word) for word in given.split(",")]
    if neighbors == 1:
        return ()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return [local_index]
    share, rest = divmod(len(visible.split(",")), neighbors)
    if share == 0:
        return ()  # the scheduler has bound each task to its own
    if rest:
        raise ValueError(
            f"{neighbors} tasks of this node cannot share {len(visible.split(','))} visible GPUs equally: "
            "start as many tasks as divide them, or set JAX_LOCAL_DEVICE_IDS"
        )
    return range(local_index * share, (local_index + 1) * share)


def _count_slurm_tasks(environment: Mapping[str, str]) -> int:
    """Return the number of tasks on this node: 8 on node 2 of `SLURM_STEP_TASKS_PER_NODE=8(x3),2`."""
    counts: list[int] = []
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "1")):
        counts += [int(tasks)] * int(nodes or 1)
    node = _read_number(environment, "SLURM_NODEID", default=0)
    if node >= len(counts):
        raise ValueError(f"SLURM_NODEID={node}, and SLURM_STEP_TASKS_PER_NODE counts the tasks of {len(counts)} nodes")
    return counts[node]


def _is_tpu_host(environment: Mapping[str, str]) -> bool:
    """Return True on a host of Cloud TPUs, where JAX asks the metadata server for the other hosts."""
    if environment.get("JAX_PLATFORMS", "tpu").split(",")[0] != "tpu":
        return False
    if "MEGASCALE_COORDINATOR_ADDRESS" in environment or "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        return True
    return "TPU_SKIP_MDS_QUERY" not in environment and find_spec("libtpu") is not None and Path("/dev/vfio/0").exists()


def _read_number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environment.get(name, str(default))
    if not value.strip().isdecimal():
        raise ValueError(f"{name}={value!r}: expected a number, 0 or more")
    return int(value)
