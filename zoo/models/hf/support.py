"""Table of the tests that each family passes, generated from the fixtures and shipped with the package."""

import dataclasses
import functools
import json
from pathlib import Path

from .families import FAMILIES

TABLE = Path(__file__).with_name("support.json")


@dataclasses.dataclass(frozen=True)
class FamilySupport:
    """Tests that a family's checkpoints pass, on small models: against PyTorch, and against one device."""

    cases: tuple[str, ...] = ()
    """Reference cases: activations, gradients, padding and files are PyTorch's."""
    mesh: bool = False
    """A step on data 2 x fsdp 2 x tensor 2, of packed rows where the model takes them, equals one on one device."""
    adapters: bool = False
    """LoRA around every linear layer does too."""
    decoding: bool = False
    """Greedy tokens, with caches, are PyTorch's."""
    quantized: tuple[str, ...] = ()
    """Formats of quantized files with a case of this family. Others are read by the same code."""

    def __str__(self) -> str:
        words = [f"{len(self.cases)} case{'s' * (len(self.cases) != 1)}"]
        words += [name for name in ("mesh", "adapters", "decoding") if getattr(self, name)]
        return ", ".join([*words, *self.quantized])


@functools.cache
def read_support() -> dict[str, FamilySupport]:
    """Read the table, by `model_type`."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    support = {}
    for name, row in table.items():
        lists = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
        support[name] = FamilySupport(**{**row, **lists})
    return support


def families() -> dict[str, FamilySupport]:
    """Return the tested features of every family that `zoo.load` reads and `zoo.save` writes, by its `model_type`."""
    support = read_support()
    return {name: support.get(name, FamilySupport()) for name in FAMILIES}
