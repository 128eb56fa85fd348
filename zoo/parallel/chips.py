"""Accelerators: memory, peak FLOPs and links of one device from the data sheets of their makers, and the rates that
matrix products reached where somebody measured them."""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from zoo.ops.platform import Platform

from .imagined import is_imagined

GIB = 2.0**30
GB = 1e9
TERA = 1e12


@dataclasses.dataclass(frozen=True)
class Chip:
    """Memory, rates and links of one device, at best."""

    name: str
    platform: Platform
    memory: int
    """Bytes of HBM."""
    bandwidth: float
    """Bytes per second of HBM."""
    flops: Mapping[str, float]
    """Dense FLOPs per second of products, by the dtype of their operands. By default JAX multiplies float32 in one
    bfloat16 pass on TPUs and in TF32 on GPUs; `float32 highest` is the rate for
    `jax.default_matmul_precision("highest")`."""
    link: float
    """Bytes per second that a device sends to others of its fast domain: the GPUs of a host by NVLink, or one dim of a
    slice's torus by ICI."""
    network: float
    """Bytes per second and device that leave the fast domain: InfiniBand, or the data center network."""
    source: str
    measured: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """FLOPs per second that a large matrix product reached, by the dtype of its operands; empty if nobody measured."""
    measured_source: str = ""

    def rate(self, dtype: str) -> float:
        """Return FLOPs per second of products in `dtype`. **Raises** `KeyError` for a dtype that is not on the data
        sheet."""
        if dtype in self.flops:
            return self.flops[dtype]
        return self.flops[_SAME_RATE[dtype]]

    def measured_rate(self, dtype: str) -> float:
        """Return FLOPs per second that a product in `dtype` reached, or the data sheet's rate if nobody measured."""
        return self.measured.get(dtype, self.measured.get(_SAME_RATE.get(dtype, ""), self.rate(dtype)))


_SAME_RATE = {"float16": "bfloat16", "float8_e4m3fn": "float8", "float8_e5m2": "float8", "int8": "float8"}
"""Dtypes multiplied at the rate of another one."""


def _make_tpu(
    name: str,
    memory: float | int,
    bandwidth: float | int,
    teraflops: float | int,
    ici: float | int,
    dims: int,
    network: float | int,
    source: str,
) -> Chip:
    """`ici` is the sheet's bandwidth of a chip over all its links in both directions, in GB/s, and `network` is in
    Gb/s: a ring along one of the torus's `dims` sends over two of its links."""
    rate = teraflops * TERA
    float8_rate = 2 * rate if name == "tpu7x" else rate
    rates = {"bfloat16": rate, "float32": rate, "float32 highest": rate / 6, "float8": float8_rate}
    ring = ici * GB / 2 / dims
    return Chip(name, "tpu", round(memory), bandwidth * GB, rates, ring, network * GB / 8, source)


def _make_gpu(
    name: str,
    memory: float | int,
    bandwidth: float | int,
    teraflops: tuple[float | int, ...],
    link: float | int,
    network: float | int,
    source: str,
    measured: Mapping[str, float | int] | None = None,
    measured_source: str = "",
) -> Chip:
    """`teraflops` are the rates of FP8, BF16, TF32 and FP32 without sparsity; `link` is the sheet's GB/s of NVLink or
    PCIe in both directions, `network` is in Gb/s, and `measured` in TFLOP/s."""
    rates: dict[str, float] = {}
    for dtype, rate in zip(("float8", "bfloat16", "float32", "float32 highest"), teraflops, strict=True):
        rates[dtype] = rate * TERA
    reached = {dtype: rate * TERA for dtype, rate in (measured or {}).items()}
    links = (link * GB / 2, network * GB / 8)
    return Chip(name, "gpu", round(memory), bandwidth * GB, rates, *links, source, reached, measured_source)


def _make_card(
    name: str,
    memory: float | int,
    bandwidth: float | int,
    teraflops: tuple[float | int, ...],
    pcie: float | int,
    source: str,
) -> Chip:
    """A GPU on a PCIe card, whose hosts are planned one at a time: the network is as fast as PCIe."""
    return _make_gpu(name, memory, bandwidth, teraflops, pcie, pcie * 4, source)


_GOOGLE = "docs.cloud.google.com/tpu/docs/"
_HOPPER = "NVIDIA H100 Tensor Core GPU data sheet; DGX H100: eight 400 Gb/s adapters for eight GPUs"
_ONE_PRODUCT = "one large product on an H100, jax 0.11.2 (docs/performance.md)"
_BEST_SHAPE = "best of many shapes, torch 2.6, 2.7 (github.com/stas00/ml-engineering, compute/accelerator)"

CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        # A pod's 6.4 Tb/s of data center network over its 256 chips.
        _make_tpu("v5e", 16 * GB, 819, 197, 400, 2, 25, f"{_GOOGLE}v5e"),
        _make_tpu("v5p", 95 * GIB, 2765, 459, 1200, 3, 50, f"{_GOOGLE}v5p"),
        _make_tpu("v6e", 32 * GB, 1638, 918, 800, 2, 100, f"{_GOOGLE}v6e"),
        # Half a chip: JAX has two devices per chip.
        _make_tpu("tpu7x", 96 * GIB, 3690, 1153.5, 600, 3, 50, f"{_GOOGLE}tpu7x"),
        _make_gpu(
            *("a100", 80 * GB, 2039, (312, 312, 156, 19.5), 600, 200),
            "NVIDIA A100 data sheet, 80 GB SXM, which has no FP8; DGX A100: eight 200 Gb/s adapters for eight GPUs",
            {"bfloat16": 271.2},
            _BEST_SHAPE,
        ),
        _make_gpu(
            *("h100", 80 * GB, 3350, (1979, 989.5, 494.5, 67), 900, 400, _HOPPER),
            {"bfloat16": 645},
            _ONE_PRODUCT,
        ),
        _make_gpu(
            *("h200", 141 * GB, 4800, (1979, 989.5, 494.5, 67), 900, 400, "NVIDIA H200 data sheet; DGX H200"),
            {"bfloat16": 645},
            f"{_ONE_PRODUCT}, which has the same cores",
        ),
        _make_gpu(
            *("b200", 180 * GB, 8000, (4500, 2250, 1100, 80), 1800, 400),
            "NVIDIA DGX B200 data sheet: 1,440 GB and 64 TB/s over eight GPUs; HGX B200's rates without sparsity",
            {"bfloat16": 1745, "float8": 3432.5},
            _BEST_SHAPE,
        ),
        _make_card("l4", 24 * GB, 300, (242, 121, 60, 30.3), 64, "NVIDIA L4 data sheet, without sparsity"),
        _make_card("l40s", 48 * GB, 864, (733, 362.05, 183, 91.6), 64, "NVIDIA L40S data sheet"),
        _make_card(
            *("rtx3090", 24 * GB, 936, (71, 71, 35.6, 35.6), 64),
            "NVIDIA Ampere GA102 whitepaper, appendix A: sums in float32; no FP8",
        ),
        _make_card(
            *("rtx4090", 24 * GB, 1008, (330.3, 165.2, 82.6, 82.6), 64),
            "NVIDIA Ada GPU architecture whitepaper, appendix A: sums in float32",
        ),
        _make_card(
            *("rtx5090", 32 * GB, 1792, (419, 209.5, 104.8, 104.8), 128),
            "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A: sums in float32",
        ),
    )
}
"""By the word that begins a topology: `h100:8x8`."""

_KINDS = {
    **dict.fromkeys(("TPU v5 lite", "TPU v5e"), "v5e"),
    **dict.fromkeys(("TPU v5", "TPU v5p"), "v5p"),
    **dict.fromkeys(("TPU v6 lite", "TPU v6e"), "v6e"),
    "TPU7x": "tpu7x",
}
"""Names of chips by JAX's `device_kind`."""
_SXM = re.compile(r"NVIDIA (A100|H100|H200|B200)\b(?!.*(PCIE|NVL))", re.IGNORECASE)
"""GPUs of an HGX board; the cards for PCIe have other rates and links."""
_CARD = re.compile(r"NVIDIA (?:GeForce )?(L4|L40S|RTX [345]090)$", re.IGNORECASE)


def find_chip(device: Any) -> Chip | None:
    """Return the chip of a JAX device by its `device_kind`; None for a CPU and any other kind that is not listed."""
    kind = device.device_kind
    if found := _SXM.match(kind) or _CARD.match(kind):
        return CHIPS[found[1].lower().replace(" ", "")]
    return CHIPS.get(_KINDS.get(kind, ""))


def count_domain(devices: Sequence[Any]) -> int:
    """Count the devices that fast links join: those of a slice or host, at most.

    JAX numbers slices of TPUs, and hosts of GPUs, by `slice_index`. Imagined GPUs have only the `process_index` of a
    host.
    """
    name = "slice_index"
    if devices[0].platform != "tpu" and is_imagined(devices[0]):
        name = "process_index"
    return max(Counter(getattr(device, name, None) for device in devices).values())
