"""Training steps that the estimate of `zoo.plan` and the compilers are compared on: 25 meshes and options, of eight TPU
v5e chips and of eight H100s."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import zoo
from zoo import Layout
from zoo.layers import Attention, GatedDeltaNet
from zoo.ops.rotary import Rotary
from zoo.parallel import SEQUENCE, ZERO1, ZERO2
from zoo.tools.plan.options import TrainingOptions
from zoo.tools.plan.training import make_training_step

SIZES = {"vocab": 32768, "embed": 2048, "layers": 4, "heads": 16, "mlp": 5632}
MODELS: dict[str, Callable] = {
    "dense": partial(zoo.models.Transformer, **SIZES, kv_heads=8, rotary=Rotary(128), tied=False),
    "tied": partial(zoo.models.Transformer, **SIZES, rotary=Rotary(128)),
    "deep": partial(zoo.models.Transformer, **SIZES | {"layers": 8}, kv_heads=8, rotary=Rotary(128), tied=False),
    "narrow heads": partial(zoo.models.Transformer, **SIZES | {"heads": 32}, kv_heads=8, rotary=Rotary(64), tied=False),
    "wide": partial(
        zoo.models.Transformer,
        **SIZES | {"vocab": 128256, "embed": 4096, "layers": 2, "heads": 32, "mlp": 14336},
        kv_heads=8,
        rotary=Rotary(128),
        tied=False,
    ),
    "mixture": partial(zoo.models.MixtureOfExperts, **SIZES | {"mlp": 1408}, experts=8, top=2, rotary=Rotary(128)),
    "mamba2": partial(zoo.models.Mamba2, vocab=32768, embed=2048, layers=4),
    "hybrid": partial(
        zoo.models.Hybrid,
        vocab=32768,
        embed=2048,
        layers=4,
        mlp=5632,
        pattern=[partial(GatedDeltaNet, heads=16), partial(Attention, heads=16, rotary=Rotary(128))],
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One training step on one mesh."""

    topology: str
    model: str
    mesh: Mapping[str, int]
    options: TrainingOptions
    layout: Layout | None = None


_BASE = TrainingOptions(rows=32, seq=2048)
_STEPS: dict[str, tuple[str, dict[str, int], dict[str, Any], Layout | None]] = {
    "data": ("dense", {"data": 8}, {}, None),
    "data, no remat": ("dense", {"data": 8}, {"remat": "none"}, None),
    "zero1": ("dense", {"fsdp": 8}, {}, ZERO1),
    "zero2, micro-batches": ("dense", {"fsdp": 8}, {"microbatches": 4}, ZERO2),
    "fsdp": ("dense", {"fsdp": 8}, {}, None),
    "fsdp, no remat": ("dense", {"fsdp": 8}, {"remat": "none"}, None),
    "fsdp, dots": ("tied", {"fsdp": 8}, {"remat": "dots"}, None),
    "fsdp, float32": ("dense", {"fsdp": 8}, {"dtype": "float32"}, None),
    "fsdp, micro-batches": ("tied", {"fsdp": 8}, {"microbatches": 4}, None),
    "fsdp, heads of 64": ("narrow heads", {"fsdp": 8}, {}, None),
    "fsdp, wide": ("wide", {"fsdp": 8}, {"rows": 8}, None),
    "tensor": ("dense", {"tensor": 4, "data": 2}, {}, None),
    "tensor, micro-batches": ("tied", {"tensor": 4, "data": 2}, {"microbatches": 4}, None),
    "sequence": ("dense", {"tensor": 4, "data": 2}, {"remat": "none"}, SEQUENCE),
    "fsdp x tensor": ("dense", {"fsdp": 4, "tensor": 2}, {"remat": "dots"}, None),
    "fsdp x tensor, sequence": ("dense", {"fsdp": 2, "tensor": 4}, {}, SEQUENCE),
    "data x fsdp x tensor": ("tied", {"data": 2, "fsdp": 2, "tensor": 2}, {"remat": "none"}, None),
    "context": ("dense", {"fsdp": 2, "context": 4}, {}, Layout(context="gathered")),
    "ring": ("dense", {"fsdp": 2, "context": 4}, {}, None),
    "expert": ("mixture", {"data": 2, "expert": 4}, {}, None),
    "expert x fsdp": ("mixture", {"fsdp": 2, "expert": 4}, {"remat": "none"}, None),
    "pipe": ("deep", {"pipe": 4, "data": 2}, {"microbatches": 8}, None),
    "pipe x fsdp x tensor": ("deep", {"pipe": 2, "fsdp": 2, "tensor": 2}, {"microbatches": 4}, None),
    "mamba2": ("mamba2", {"fsdp": 8}, {}, None),
    "hybrid": ("hybrid", {"fsdp": 4, "tensor": 2}, {}, None),
}
CASES = {
    f"{topology} {name}": Case(topology, model, mesh, dataclasses.replace(_BASE, **changes), layout)
    for topology in ("v5e:2x4", "h100:8")
    for name, (model, mesh, changes, layout) in _STEPS.items()
}


def make_case(name: str, devices: Sequence[Any]) -> tuple[Callable, tuple[Any, Any, Any]]:
    """Return the step of a case on these devices, and the shapes of its arguments."""
    case = CASES[name]
    mesh = zoo.make_mesh(**{"data": 1, **case.mesh}, devices=devices, layout=case.layout)
    return make_training_step(MODELS[case.model], mesh, case.options)
