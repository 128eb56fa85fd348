"""Start of JAX on the processes of a cluster."""

import os
import sys

import jax

from zoo._terminal import show

from .clusters import find_cluster, is_tpu_pod
from .rendezvous import describe_names, meet
from .watch import Watch

_watch: Watch | None = None


def initialize(*, timeout: int = 300, heartbeat: int = 30) -> None:
    """Connect the processes of a program, where a cluster shows in the environment; do nothing elsewhere.

    Looks, in this order, for

    - `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` (or `JOB_COMPLETION_INDEX`, which Kubernetes
      sets in an indexed Job and in a JobSet);
    - Slurm, in a step of `srun` with more than one task;
    - Open MPI, MPICH and Intel MPI, whose ranks need `JAX_COORDINATOR_ADDRESS` beside them, except under Open MPI 4;
    - Cloud TPU, of one slice or several.

    A second call does nothing. Call it before the first computation; the recipes do, through `train.run_cli`. All
    processes first meet at the coordinator's port, for `timeout` seconds, and the first one prints where they run. When
    one of them is killed or ends by an exception, each of the others prints its number, host and error, and ends within
    seconds; one whose host is lost is noticed after `heartbeat` seconds. On Cloud TPU JAX alone watches, and prints the
    number. One task per node gets all of its GPUs, several tasks share them in equal parts; `JAX_LOCAL_DEVICE_IDS`
    overrides that.

    **Raises** `ValueError` for an environment that is incomplete or contradicts itself; `TimeoutError`, in every
    process that came, with the numbers of those that did not; `RuntimeError` if JAX has already run a computation.
    """
    if jax.distributed.is_initialized():
        return
    cluster = find_cluster(os.environ)
    on_tpus = cluster is None and is_tpu_pod(os.environ)
    if not on_tpus and (cluster is None or cluster.num_processes == 1):
        return
    _require_unstarted()
    if cluster is None:
        jax.distributed.initialize(initialization_timeout=timeout, heartbeat_timeout_seconds=heartbeat)
        return
    names, connections = meet(cluster, timeout)
    jax.distributed.initialize(
        cluster.coordinator,
        cluster.num_processes,
        cluster.process_id,
        local_device_ids=cluster.local_device_ids,
        cluster_detection_method="deactivate",  # JAX gives a task alone on its node one GPU
        initialization_timeout=timeout,
        heartbeat_timeout_seconds=heartbeat,
        shutdown_timeout_seconds=2 * heartbeat,
    )
    global _watch
    _watch = Watch(cluster.process_id, names, connections, timeout=heartbeat)
    _watch.start()
    if cluster.process_id == 0:
        show(f"{len(names)} processes, found by {cluster.source}: {describe_names(names)}", file=sys.stderr)


def announce_failure(reason: str, status: int) -> None:
    """Tell the other processes, if there are any, that this one is about to end with `status`, and why.

    An exception that nobody handles is announced without it.
    """
    if _watch is not None:
        _watch.announce_failure(reason, status)


def is_first_process() -> bool:
    """Return True in process 0. Starts no backend, which would read XLA's flags."""
    from jax._src.distributed import global_state  # `jax.process_index` starts one

    return global_state.process_id in (None, 0)


def count_processes() -> int:
    """Return the number of processes. Starts no backend, as `jax.process_count` does."""
    from jax._src.distributed import global_state

    return global_state.num_processes or 1


def _require_unstarted() -> None:
    from jax._src import xla_bridge  # no public function tells without starting a backend

    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "JAX has already run a computation in this process, which sees its own devices alone: call "
            "zoo.distributed.initialize() first"
        )
