"""Time of collectives on the links between devices: fast ones within a host or a slice, slow ones beyond."""

import dataclasses
import math
from collections.abc import Mapping

from zoo.inspect import Collective
from zoo.inspect.work import count_sent_bytes
from zoo.parallel.topology import Topology

from .chips import Chip


@dataclasses.dataclass(frozen=True)
class Transfer:
    """All collectives of one kind over one set of axes, on the links of a topology."""

    collective: Collective
    sent: float
    """Bytes that each device sends."""
    crosses: bool
    """True if the groups reach beyond a host or a slice."""
    seconds: float


def time_transfer(collective: Collective, shape: Mapping[str, int], topology: Topology, chip: Chip) -> Transfer:
    """Return what a collective takes at least: bytes sent in a ring over the bandwidth of the links.

    Devices stand in the order of the mesh, so that inner axes lie on fast links. Where a group of n devices has m of
    them in each host or slice, the others receive what those have together: each sends 1 / m of the bytes over the
    network, and all of them over the fast links.
    """
    inside = count_inside(collective.axes or (), shape, topology.domain)
    size = math.prod(shape[axis] for axis in collective.axes or ())
    sent = count_sent_bytes(collective, shape)
    crosses = inside < size
    slow = sent / inside / chip.network if crosses else 0.0
    fast = sent / chip.link if inside > 1 else 0.0
    return Transfer(collective, sent, crosses, max(fast, slow))


def count_inside(axes: tuple[str, ...], shape: Mapping[str, int], domain: int) -> int:
    """Return how many devices of a group over these axes are in one host or slice of `domain` devices."""
    inside, stride = 1, 1
    for axis in reversed(list(shape)):
        if axis in axes:
            inside *= min(shape[axis], max(domain // stride, 1))
        stride *= shape[axis]
    return inside
