"""Clusters, as the environment of a process tells them: its number, how many there are, and where the first one is."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_PORTS = range(61440, 65536)  # of coordinators: one for each job, so that two jobs of a node do not meet


@dataclass(frozen=True)
class Cluster:
    """Coordinates of this process: what `jax.distributed.initialize` asks for, and the scheduler that told it."""

    source: str
    coordinator: str
    num_processes: int
    process_id: int
    local_device_ids: Sequence[int] | None = None


def find_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """Return the cluster that the environment tells of, or None. **Raises** `ValueError` if it is told in part."""
    for find in (_find_plain, _find_slurm, _find_mpi):
        cluster = find(environment)
        if cluster is not None:
            if not 0 <= cluster.process_id < cluster.num_processes:
                raise ValueError(
                    f"{cluster.source} says that this is process {cluster.process_id} of {cluster.num_processes}: "
                    f"processes are numbered from 0 to {cluster.num_processes - 1}"
                )
            return cluster
    return None


def is_tpu_pod(environment: Mapping[str, str]) -> bool:
    """Return True on a host of Cloud TPUs, which asks its metadata server for the other hosts."""
    if environment.get("JAX_PLATFORMS", "tpu").split(",")[0] != "tpu":
        return False
    if "MEGASCALE_COORDINATOR_ADDRESS" in environment or "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        return True
    return "TPU_SKIP_MDS_QUERY" not in environment and find_spec("libtpu") is not None and Path("/dev/vfio/0").exists()


def _find_plain(environment: Mapping[str, str]) -> Cluster | None:
    """Read JAX's own variables. A coordinator alone may stand beside the variables of Slurm or MPI."""
    address, count = environment.get("JAX_COORDINATOR_ADDRESS"), environment.get("JAX_NUM_PROCESSES")
    index = environment.get("JAX_PROCESS_ID", environment.get("JOB_COMPLETION_INDEX"))
    if count is None and (address is None or _find_ranks(environment) is not None):
        return None
    wanted = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": count,
        "JAX_PROCESS_ID (or JOB_COMPLETION_INDEX)": index,
    }
    missing = [name for name, value in wanted.items() if value is None]
    if missing:
        there = ", ".join(name for name, value in wanted.items() if value is not None)
        raise ValueError(f"{there} is set, but not {', '.join(missing)}: set all three, or none")
    num_processes = _parse("JAX_NUM_PROCESSES", count)
    process_id = _parse("JAX_PROCESS_ID" if "JAX_PROCESS_ID" in environment else "JOB_COMPLETION_INDEX", index)
    devices = _read_devices(environment)
    return Cluster("JAX's variables", _require_port(str(address)), num_processes, process_id, devices)


def _find_slurm(environment: Mapping[str, str]) -> Cluster | None:
    names = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if any(name not in environment for name in names):
        return None  # not in a step: a login node, or the batch script itself
    job, _, tasks, process_id, local_id = (environment[name] for name in names)
    num_processes = _parse("SLURM_NTASKS", environment.get("SLURM_STEP_NUM_TASKS", tasks))
    host = _read_first_host(environment["SLURM_STEP_NODELIST"])
    port = environment.get("JAX_COORDINATOR_PORT") or _PORTS[_parse("SLURM_JOB_ID", job) % len(_PORTS)]
    address = environment.get("JAX_COORDINATOR_ADDRESS") or f"{host}:{port}"
    per_node = _expand_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    node = _parse("SLURM_NODEID", environment.get("SLURM_NODEID", "0"))
    neighbors = per_node[node] if node < len(per_node) else max(per_node)
    devices = _read_devices(environment, _parse("SLURM_LOCALID", local_id), neighbors)
    return Cluster("Slurm", _require_port(address), num_processes, _parse("SLURM_PROCID", process_id), devices)


def _find_mpi(environment: Mapping[str, str]) -> Cluster | None:
    ranks = _find_ranks(environment)
    if ranks is None:
        return None
    source, num_processes, process_id = ranks
    local = environment.get("OMPI_COMM_WORLD_LOCAL_RANK", environment.get("MPI_LOCALRANKID", "0"))
    neighbors = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", environment.get("MPI_LOCALNRANKS", "1"))
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    contact = environment.get("OMPI_MCA_orte_hnp_uri", "")  # 4096.0;tcp://10.0.0.1,10.0.1.1:3400
    launcher = re.match(r"(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^],]+))", contact)
    if address is None and launcher is not None:
        port = environment.get("JAX_COORDINATOR_PORT") or _PORTS[(int(launcher[1]) >> 12) % len(_PORTS)]
        address = f"{launcher[2] or f'[{launcher[3]}]'}:{port}"
    if address is None:
        raise ValueError(
            f"{source} started {num_processes} processes, and does not say where the first one runs: pass "
            "JAX_COORDINATOR_ADDRESS=HOST:PORT of its node to all of them (mpirun -x JAX_COORDINATOR_ADDRESS=...)"
        )
    devices = _read_devices(environment, _parse("the local rank", local), _parse("the local size", neighbors))
    return Cluster(source, _require_port(address), num_processes, process_id, devices)


def _find_ranks(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Return launcher, number of processes and index, where one of several launchers started more than one."""
    pairs = {
        "Slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        "MPI": ("PMI_SIZE", "PMI_RANK"),
    }
    for source, (size, rank) in pairs.items():
        if size in environment and rank in environment and _parse(size, environment[size]) > 1:
            return source, _parse(size, environment[size]), _parse(rank, environment[rank])
    return None


def _read_devices(environment: Mapping[str, str], local_id: int = 0, neighbors: int = 1) -> list[int] | None:
    """Return the indices of this process's GPUs among the visible ones, or None for all of them."""
    given = environment.get("JAX_LOCAL_DEVICE_IDS")
    if given:
        return [_parse("JAX_LOCAL_DEVICE_IDS", word) for word in given.split(",")]
    if neighbors == 1:
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return [local_id]
    share, rest = divmod(len(visible.split(",")), neighbors)
    if share == 0:
        return None  # the scheduler has bound each task to its own
    if rest:
        raise ValueError(
            f"{neighbors} tasks of this node cannot share {len(visible.split(','))} visible GPUs equally: "
            "start as many tasks as divide them, or set JAX_LOCAL_DEVICE_IDS"
        )
    return list(range(local_id * share, (local_id + 1) * share))


def _read_first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: `a07` of `a[07-12,15],b3`."""
    found = re.match(r"([^,\[]+)(?:\[(\d+))?([^,\[\]]*)", nodes)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r} names no host")
    return found[1] + (found[2] or "")


def _expand_counts(text: str) -> list[int]:
    """Return Slurm's counts by node: [2, 2, 2, 1] of `2(x3),1`."""
    counts = []
    for word in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if found is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text!r} was expected to read like 8(x3),2")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _parse(name: str, value: str | None) -> int:
    if value is None or not value.strip().isdecimal():
        raise ValueError(f"{name}={value!r} was expected to be a number, 0 or more")
    return int(value)


def _require_port(address: str) -> str:
    if not re.fullmatch(r".+:\d+", address):
        raise ValueError(f"JAX_COORDINATOR_ADDRESS={address!r} was expected to be HOST:PORT, as in node-0:61440")
    return address
