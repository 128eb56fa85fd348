"""Time of collectives on the links between devices: fast ones within a host or a slice, slow ones beyond."""

import dataclasses
import math
from collections.abc import Mapping

from zoo.inspect import Collective
from zoo.parallel.topology import Topology

from .chips import Chip
from .work import count_sent_bytes

_EXCHANGES = ("all-to-all", "ragged-all-to-all")


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
    """Return the minimum time of a collective: bytes sent in a ring over the bandwidth of the links.

    Devices stand in the order of the mesh, so inner axes lie on fast links. Of a group of n devices, m are in each host
    or slice. Of the bytes that a device sends, these cross the network:

    - to gather, scatter or sum, 1 / m: the other devices receive the data of those m devices together, once;
    - in an all-to-all, (n - m) / (n - 1): each other device receives its own part;
    - in a permutation, all bytes of the devices at the border of a host, for which the rest wait.
    """
    inside = count_inside(collective.axes or (), shape, topology.domain)
    size = math.prod(shape[axis] for axis in collective.axes or ())
    sent = count_sent_bytes(collective, shape)
    crosses = inside < size
    on_links = float(inside > 1)
    on_network = float(crosses)
    if collective.kind in _EXCHANGES:
        on_links, on_network = ((peers / max(size - 1, 1)) for peers in (inside - 1, size - inside))
    elif collective.kind != "collective-permute":
        on_network /= inside
    return Transfer(collective, sent, crosses, max(on_links * sent / chip.link, on_network * sent / chip.network))


def count_inside(axes: tuple[str, ...], shape: Mapping[str, int], domain: int) -> int:
    """Return how many devices of a group over these axes are in one host or slice of `domain` devices."""
    inside, stride = 1, 1
    for axis in reversed(list(shape)):
        if axis in axes:
            inside *= min(shape[axis], max(domain // stride, 1))
        stride *= shape[axis]
    return inside
