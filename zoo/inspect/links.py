"""Time of collectives on the links between devices: fast ones within a host or a slice, slow ones beyond."""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping

from zoo.parallel.chips import Chip
from zoo.parallel.topology import Topology

from .collectives import Collective, DeviceGroups

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
    sent = _count_sent_bytes(collective.kind, collective.bytes, size)
    return Transfer(collective, sent, inside < size, _time_group(collective.kind, sent, size, inside, chip))


def time_groups(kind: str, size: int, groups: DeviceGroups, domain: int, chip: Chip) -> tuple[float, bool]:
    """Return the seconds of one collective of `size` bytes, and whether it uses the network, as `time_transfer` does,
    from its replica groups: the slowest group counts. Each `domain` devices in order are a host or a slice."""
    times = [0.0]
    crosses = False
    for group in groups:
        inside = max(Counter(device // domain for device in group).values())
        sent = _count_sent_bytes(kind, size, len(group))
        times.append(_time_group(kind, sent, len(group), inside, chip))
        crosses = crosses or inside < len(group)
    return max(times), crosses


def _count_sent_bytes(kind: str, size: int, devices: int) -> float:
    """Return the bytes that each device sends in a ring: of n devices, (n - 1) / n of the bytes, twice for an
    all-reduce; all for a permutation."""
    share = (devices - 1) / devices
    factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(kind, share)
    return factor * size


def _time_group(kind: str, sent: float, size: int, inside: int, chip: Chip) -> float:
    """Return the seconds of a group of `size` devices, of which `inside` are in each host or slice."""
    on_links = float(inside > 1)
    on_network = float(inside < size)
    if kind in _EXCHANGES:
        on_links, on_network = ((peers / max(size - 1, 1)) for peers in (inside - 1, size - inside))
    elif kind != "collective-permute":
        on_network /= inside
    return max(on_links * sent / chip.link, on_network * sent / chip.network)


def count_inside(axes: tuple[str, ...], shape: Mapping[str, int], domain: int) -> int:
    """Return how many devices of a group over these axes are in one host or slice of `domain` devices."""
    inside, stride = 1, 1
    for axis in reversed(list(shape)):
        if axis in axes:
            inside *= min(shape[axis], max(domain // stride, 1))
        stride *= shape[axis]
    return inside
