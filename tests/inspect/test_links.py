"""Times of collectives on the links within hosts and between them."""

import pytest

from zoo.inspect.collectives import Collective
from zoo.inspect.links import time_groups, time_transfer
from zoo.parallel.topology import parse_topology
from zoo.tools.plan import CHIPS

SHAPE = {"pipe": 1, "data": 4, "fsdp": 1, "expert": 16, "context": 1, "tensor": 1}
CHIP, TOPOLOGY = CHIPS["h100"], parse_topology("h100:8x8")
BYTES = 15 * 10**9  # of which each of 16 devices sends 15 / 16


def time(kind, axis):
    return time_transfer(Collective(kind, (axis,), "", 1, 1, BYTES), SHAPE, TOPOLOGY, CHIP)


@pytest.mark.parametrize(
    ("kind", "over_links", "over_network"),
    [
        ("all-gather", 15 / 16, 15 / 16 / 8),  # the other host's devices share what it sends
        ("all-reduce", 30 / 16, 30 / 16 / 8),
        ("all-to-all", 7 / 16, 8 / 16),  # seven peers within the host, eight beyond
        ("ragged-all-to-all", 7 / 16, 8 / 16),
        ("collective-permute", 1, 1),  # the whole array, at the border of the host
    ],
)
def test_bytes_that_cross_the_network_depend_on_the_collective(kind, over_links, over_network):
    """Groups of 16 GPUs over two hosts of 8."""
    found = time(kind, "expert")
    assert found.crosses
    seconds = max(over_links * BYTES / CHIP.link, over_network * BYTES / CHIP.network)
    assert found.seconds == pytest.approx(seconds)


def test_devices_of_different_hosts_use_the_network_alone():
    """Along data each device of a group is in a host of its own."""
    assert time("all-gather", "data").seconds == pytest.approx(3 / 4 * BYTES / CHIP.network)
    assert time("all-to-all", "data").seconds == pytest.approx(3 / 4 * BYTES / CHIP.network)


GROUPS = {
    "expert": frozenset(frozenset(range(16 * data, 16 * data + 16)) for data in range(4)),
    "data": frozenset(frozenset(range(expert, 64, 16)) for expert in range(16)),
}


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all"])
@pytest.mark.parametrize("axis", GROUPS)
def test_replica_groups_take_as_long_as_their_axis(kind, axis):
    found = time(kind, axis)
    assert time_groups(kind, BYTES, GROUPS[axis], TOPOLOGY.domain, CHIP) == (found.seconds, found.crosses)


def test_slowest_pair_of_a_permutation_counts():
    within = [(number, number + 1) for number in range(7)]
    for pairs, rate in ((within, CHIP.link), ([*within, (7, 8)], CHIP.network)):
        groups = frozenset(map(frozenset, pairs))
        found = time_groups("collective-permute", BYTES, groups, 8, CHIP)
        assert found == (BYTES / rate, rate == CHIP.network)
    assert time_groups("collective-permute", BYTES, frozenset([frozenset([3])]), 8, CHIP) == (0.0, False)
