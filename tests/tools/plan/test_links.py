"""Times of collectives on the links within hosts and between them."""

import pytest

from zoo.inspect import Collective
from zoo.parallel.topology import parse_topology
from zoo.tools.plan import CHIPS, time_transfer

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
