"""Names of topologies: `v5p:4x4x4*2` are two slices of 64 TPU chips, `h100:8x8` eight hosts of eight GPUs."""

import dataclasses
import math
import re

TPU_DIMS = {"v5e": 2, "v6e": 2, "v5p": 3, "tpu7x": 3}
"""Number of dims of the torus of each TPU."""
GPUS = ("a100", "h100", "h200", "b200")
CARDS = ("l4", "l40s", "rtx3090", "rtx4090", "rtx5090")
"""GPUs on PCIe cards, of one host."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices of one kind, and how they are connected."""

    kind: str
    """A TPU or GPU, such as `v5p` or `h100`."""
    sizes: tuple[int, ...]
    """Dims of a slice's torus in chips; of GPUs, hosts and GPUs per host."""
    slices: int = 1

    @property
    def is_tpu(self) -> bool:
        return self.kind in TPU_DIMS

    @property
    def devices(self) -> int:
        """Number of JAX devices: a tpu7x has two per chip."""
        return math.prod(self.sizes) * self.slices * (2 if self.kind == "tpu7x" else 1)

    @property
    def domain(self) -> int:
        """Number of devices that fast links join: the devices of a slice, or of a host."""
        return self.devices // self.slices if self.is_tpu else self.sizes[1]

    def __str__(self) -> str:
        sizes = self.sizes[1:] if not self.is_tpu and self.sizes[0] == 1 else self.sizes
        return f"{self.kind}:{'x'.join(map(str, sizes))}" + (f"*{self.slices}" if self.slices > 1 else "")


def parse_topology(text: str) -> Topology:
    """Parse the name of a topology: `v5e:2x4`, `v5p:4x4x4*2`, `h100:8`, `h100:64x8`.

    **Raises** `ValueError` for an unknown kind of chip and for another number of dims than its torus has.
    """
    match = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)*)(?:\*([1-9]\d*))?", text)
    kind, sizes, slices = match.groups() if match else ("", "", None)
    dims = tuple(map(int, sizes.split("x"))) if sizes else ()
    if kind in GPUS and len(dims) <= 2 and slices is None:
        return Topology(kind, (1, *dims) if len(dims) == 1 else dims)
    if kind in CARDS and len(dims) == 1 and slices is None:
        return Topology(kind, (1, *dims))
    if kind in TPU_DIMS and len(dims) == TPU_DIMS[kind]:
        return Topology(kind, dims, int(slices or 1))
    raise ValueError(
        f"{text!r} is not a known topology. Known are v5e:2x4, v6e:4x4, v5p:4x4x4, tpu7x:2x2x1 and other sizes of "
        "them, v5p:4x4x4*2 for two slices, h100:8 for the GPUs of one host, and h100:8x8 for hosts x GPUs; other GPUs "
        f"are {', '.join(kind for kind in GPUS if kind != 'h100')}, and cards of one host {', '.join(CARDS)}"
    )
