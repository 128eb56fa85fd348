"""The cluster that each launcher's variables tell of, and variables that do not fit together."""

import pytest

from zoo.distributed.clusters import find_cluster

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


def describe(environment):
    found = find_cluster(environment)
    return found and (found.coordinator, found.num_processes, found.process_id, found.local_device_ids)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # a batch script, not a step
        (SLURM, ("gpu07:61441", 5, 3, None)),
        (SLURM | {"JAX_COORDINATOR_PORT": "99"}, ("gpu07:99", 5, 3, None)),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "ib-gpu07:99"}, ("ib-gpu07:99", 5, 3, None)),
        (SLURM | {"SLURM_STEP_NODELIST": "one-2,two"}, ("one-2:61441", 5, 3, None)),
        (PLAIN | {"JAX_PROCESS_ID": "2"}, ("a:1234", 4, 2, None)),
        (PLAIN | {"JOB_COMPLETION_INDEX": "3"}, ("a:1234", 4, 3, None)),
        (PLAIN | {"JAX_PROCESS_ID": "2", "JAX_LOCAL_DEVICE_IDS": "4,5"}, ("a:1234", 4, 2, [4, 5])),
        ({"JOB_COMPLETION_INDEX": "3"}, None),  # an indexed Job whose pods work alone
        (
            {
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.0.0.1:34",
            },
            ("10.0.0.1:61441", 2, 1, None),
        ),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "JAX_COORDINATOR_ADDRESS": "a:5"}, ("a:5", 2, 1, None)),
    ],
)
def test_environment_tells_the_cluster(environment, expected):
    assert describe(environment) == expected


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0,1,2,3,4,5,6,7", [4, 5, 6, 7]), ("0,1", [1]), ("5", None), (None, [1])],
)
def test_tasks_of_a_node_share_its_devices(visible, expected):
    environment = SLURM | {"SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1,2(x2)"}
    found = describe(environment | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {}))
    assert found is not None
    assert found[3] == expected


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (PLAIN, "but not JAX_PROCESS_ID"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "but not JAX_COORDINATOR_ADDRESS"),
        (PLAIN | {"JAX_PROCESS_ID": "4"}, "numbered from 0 to 3"),
        (PLAIN | {"JAX_PROCESS_ID": "one"}, "JAX_PROCESS_ID='one' was expected to be a number"),
        (PLAIN | {"JAX_PROCESS_ID": "0", "JAX_COORDINATOR_ADDRESS": "a"}, "HOST:PORT"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "mpirun -x JAX_COORDINATOR_ADDRESS"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(x5)", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "cannot share 4"),
    ],
)
def test_incomplete_environment_is_refused(environment, words):
    with pytest.raises(ValueError, match=r".") as caught:
        find_cluster(environment)
    assert words in str(caught.value)
