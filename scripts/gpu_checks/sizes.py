"""Sizes of models and inputs, as they are timed and at toy size."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from scripts.benchmarks.ours import Sizes
from scripts.benchmarks.recurrences import OPERATIONS

EIGHT_BILLION = Sizes(vocab=128256, embed=4096, layers=32, heads=32, mlp=14336, batch=1, seq=4096)
MIXTURE = Sizes(vocab=32768, embed=2048, layers=12, heads=16, mlp=1536, batch=4, seq=4096, experts=8)
"""1.2 billion parameters, of which 0.5 are active."""
RECURRENT = {"Mamba-2": 40, "Gated DeltaNet": 30}
"""Layers of recurrent models with 1.1 billion parameters."""
RECURRENCES = (
    *("linear_attention", "gla", "delta_rule", "gated_delta_rule", "kda"),
    *("ssd", "rwkv7", "hgrn2", "mlstm", "retention"),
)
NEW_TOKENS = 128


def choose(sizes: Sizes, toy: bool, **changes: Any) -> Sizes:
    """Return sizes with another batch; toy sizes keep their experts and mixers."""
    if not toy:
        return dataclasses.replace(sizes, **changes)
    kept = {"vocab": 64, "embed": 64, "layers": 1, "heads": 1, "mlp": 64, "batch": 2, "seq": 16}  # blocks of NF4 are 64
    return dataclasses.replace(sizes, **kept)


def list_recurrences(toy: bool) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """List operations, with and without gradient, and the sizes of their inputs."""
    sizes = {"batch": 4, "seq": 4096, "sizes": (16, 128), "dtype": "bfloat16", "calls": 10}
    if toy:
        sizes |= {"batch": 1, "seq": 16, "sizes": (2, 8), "calls": 1}
    for name in RECURRENCES:
        assert name in OPERATIONS
        for gradient in (False, True):
            yield name, gradient, sizes
