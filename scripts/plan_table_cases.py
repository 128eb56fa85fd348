"""Training steps of the tables that `plan_tables.py` writes: models, devices, meshes and batches."""

import dataclasses
from collections.abc import Mapping

from zoo.parallel.remat import Remat


@dataclasses.dataclass(frozen=True)
class Case:
    """One training step of a model of a published size, in bfloat16."""

    preset: str
    topology: str
    rows: int
    mesh: Mapping[str, int]
    microbatches: int = 1
    sequence: bool = False
    """Shard hidden states over tensor, too."""
    zero_stage: int = 3
    seq: int = 4096
    remat: Remat = "full"


@dataclasses.dataclass(frozen=True)
class Measured:
    """A step that somebody timed."""

    case: Case
    program: str
    """Program, and how it differs from the case."""
    seconds: float
    source: str


_1B, _8B, _70B, _405B, _8X22B, _V3 = (
    "llama3.2-1b",
    "llama3-8b",
    "llama3-70b",
    "llama3.1-405b",
    "mixtral-8x22b",
    "deepseek-v3",
)
SCREEN = Case(_8B, "h100:8x8", 256, {"fsdp": 64})
SCREEN_TOKENS = 1e12
REFUSED = Case(_70B, "h100:8", 8, {"fsdp": 8})
QLORA = Case(_8B, "rtx4090:1", 1, {}, seq=2048)
QLORA_RANK = 16
DECODING = Case(_8B, "rtx4090:1", 1, {}, seq=8192)
SIZES = (
    Case(_8B, "v5p:2x2x2", 1024, {"fsdp": 8}, 16),
    Case(_8B, "v5p:4x4x4", 1024, {"fsdp": 64}),
    Case(_8B, "v5p:8x8x8", 1024, {"fsdp": 512}),
    Case(_8B, "v5p:16x16x16", 4096, {"data": 8, "fsdp": 512}),
    Case(_8B, "h100:8", 1024, {"fsdp": 8}, 16),
    Case(_8B, "h100:8x8", 1024, {"fsdp": 64}),
    Case(_8B, "h100:64x8", 1024, {"fsdp": 512}),
    Case(_8B, "h100:512x8", 4096, {"data": 64, "fsdp": 64}),
    Case(_70B, "v5p:4x4x4", 1024, {"fsdp": 64}, 4),
    Case(_70B, "v5p:8x8x8", 1024, {"fsdp": 512}),
    Case(_70B, "v5p:16x16x16", 4096, {"fsdp": 1024, "tensor": 4}, 1, True),
    Case(_70B, "h100:8x8", 1024, {"fsdp": 64}, 8),
    Case(_70B, "h100:64x8", 1024, {"fsdp": 512}),
    Case(_70B, "h100:512x8", 4096, {"fsdp": 512, "tensor": 8}, 1, True),
    Case(_8X22B, "v5p:4x4x4", 1024, {"fsdp": 8, "expert": 8}, 8),
    Case(_8X22B, "v5p:8x8x8", 1024, {"fsdp": 64, "expert": 8}),
    Case(_8X22B, "v5p:16x16x16", 4096, {"fsdp": 512, "expert": 8}),
    Case(_8X22B, "h100:8x8", 1024, {"fsdp": 8, "expert": 8}, 8),
    Case(_8X22B, "h100:64x8", 1024, {"fsdp": 64, "expert": 8}),
    Case(_8X22B, "h100:512x8", 4096, {"fsdp": 512, "expert": 8}),
    Case(_405B, "v5p:8x8x8", 1024, {"fsdp": 128, "tensor": 4}, 1, True),
    Case(_405B, "v5p:16x16x16", 4096, {"fsdp": 512, "tensor": 8}, 1, True),
    Case(_405B, "h100:64x8", 1024, {"fsdp": 64, "tensor": 8}, 2, True),
    Case(_405B, "h100:512x8", 4096, {"fsdp": 512, "tensor": 8}, 1, True),
    Case(_V3, "v5p:8x16x16", 2048, {"fsdp": 32, "expert": 64}),
    Case(_V3, "v5p:16x16x16", 4096, {"fsdp": 64, "expert": 64}),
    Case(_V3, "h100:256x8", 2048, {"fsdp": 32, "expert": 64}),
    Case(_V3, "h100:512x8", 4096, {"fsdp": 64, "expert": 64}),
)
"""Each model on 8 to 4,096 devices, where its parameters, gradients and moments have room."""
COMPARISONS: dict[str, tuple[Case, ...]] = {
    "1b": (
        Case(_1B, "h100:8x8", 256, {"data": 64}),
        Case(_1B, "h100:8x8", 256, {"data": 8, "fsdp": 8}),
        Case(_1B, "h100:8x8", 256, {"fsdp": 8, "tensor": 8}, 1, True),
        Case(_1B, "v5p:4x4x4", 256, {"data": 64}),
        Case(_1B, "v5p:4x4x4", 256, {"fsdp": 64}),
        Case(_1B, "v5p:4x4x4", 256, {"fsdp": 16, "tensor": 4}, 1, True),
    ),
    "8b": (
        Case(_8B, "h100:8x8", 256, {"data": 8, "fsdp": 8}),
        SCREEN,
        Case(_8B, "h100:8x8", 256, {"fsdp": 64}, 4),
        Case(_8B, "h100:8x8", 256, {"fsdp": 8, "tensor": 8}, 1, True),
        Case(_8B, "h100:8x8", 256, {"pipe": 4, "data": 16}, 16, zero_stage=1),
        Case(_8B, "v5p:4x4x4", 256, {"fsdp": 64}),
        Case(_8B, "v5p:4x4x4", 256, {"fsdp": 16, "tensor": 4}, 1, True),
    ),
    "70b": (
        Case(_70B, "h100:64x8", 1024, {"fsdp": 512}),
        Case(_70B, "h100:64x8", 1024, {"fsdp": 64, "tensor": 8}, 1, True),
        Case(_70B, "h100:64x8", 256, {"fsdp": 64, "tensor": 8}, 1, True),
        Case(_70B, "h100:64x8", 256, {"pipe": 4, "fsdp": 16, "tensor": 8}, 16, True, 1),
        Case(_70B, "v5p:8x8x8", 1024, {"fsdp": 512}),
        Case(_70B, "v5p:8x8x8", 1024, {"fsdp": 128, "tensor": 4}, 1, True),
    ),
    "400b": (
        Case(_405B, "h100:512x8", 4096, {"fsdp": 4096}),
        Case(_405B, "h100:512x8", 4096, {"fsdp": 512, "tensor": 8}, 1, True),
        Case(_405B, "h100:512x8", 1024, {"fsdp": 512, "tensor": 8}, 1, True),
        Case(_405B, "h200:512x8", 1024, {"pipe": 8, "fsdp": 64, "tensor": 8}, 16, True, 1),
        Case(_405B, "v5p:16x16x16", 4096, {"fsdp": 512, "tensor": 8}, 1, True),
        Case(_405B, "v5p:16x16x16", 1024, {"fsdp": 512, "tensor": 8}, 1, True),
    ),
    "deepseek": (
        Case(_V3, "h100:256x8", 2048, {"fsdp": 256, "expert": 8}),
        Case(_V3, "h100:256x8", 2048, {"fsdp": 32, "expert": 64}),
        Case(_V3, "v5p:8x16x16", 2048, {"fsdp": 32, "expert": 64}),
    ),
    "mixtral": (
        Case(_8X22B, "h100:64x8", 1024, {"fsdp": 512}),
        Case(_8X22B, "h100:64x8", 1024, {"fsdp": 64, "expert": 8}),
        Case(_8X22B, "v5p:8x8x8", 1024, {"fsdp": 64, "expert": 8}),
    ),
}
"""Meshes of one model beside one another, on the same devices."""
LONG = (
    Case(_8B, "h100:8x8", 64, {"fsdp": 64}, 1, seq=131072),
    Case(_8B, "h100:8x8", 64, {"fsdp": 8, "tensor": 8}, 8, True, seq=131072),
    Case(_8B, "h100:8x8", 64, {"fsdp": 8, "context": 8}, 8, seq=131072),
)
"""Rows of 131,072 tokens, by their memory alone."""
BATCHES = (
    *(Case(_70B, "h100:64x8", rows, {"fsdp": 512}) for rows in (512, 1024, 2048)),
    *(Case(_70B, "h100:64x8", rows, {"fsdp": 64, "tensor": 8}, 1, True) for rows in (256, 1024)),
    Case(_70B, "h100:64x8", 256, {"pipe": 4, "fsdp": 16, "tensor": 8}, 16, True, 1),
)
"""One model by the size of its batch."""

_1_09B = "1.09b"
_TORCHTITAN = (
    "[torchtitan](https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md), 2024-12"
)
_SLOWER = "torchtitan, compiled; cards of 96 GB, 2.4 TB/s and 500 W, selective recomputation"
MEASURED = (
    Measured(Case(_1_09B, "h100:1", 8, {}), "zoo", 0.585, "[Performance](performance.md#on-one-h100)"),
    Measured(
        Case(_1_09B, "h100:1", 4, {}, remat="elementwise"), "zoo", 0.272, "[Performance](performance.md#on-one-h100)"
    ),
    Measured(
        Case("llama3.1-8b", "h100:8", 16, {"fsdp": 8}, seq=8192, remat="dots"),
        _SLOWER,
        2 * 8192 / 6667,
        f"{_TORCHTITAN}, table 1",
    ),
    Measured(
        Case("llama3.1-8b", "h100:16x8", 256, {"fsdp": 128}, seq=8192, remat="dots"),
        _SLOWER,
        2 * 8192 / 6514,
        f"{_TORCHTITAN}, table 3",
    ),
    Measured(
        Case(_70B, "h100:16x8", 256, {"fsdp": 128}, seq=8192),
        "MaxText",
        15.57,
        "NVIDIA NGC, Maxtext Llama3 70B 25.02 (DGXC Benchmarking)",
    ),
)
"""Steps of H100s that were timed, by us and by others. torchtitan publishes tokens per second and GPU, of two rows
each."""
