"""Training steps of adapters against full training: time and memory."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

import zoo
from zoo import adapters

from . import ours

RANK = 8


def _wrap(add: Callable, model: Any) -> Any:
    return add(model, targets="all-linear", rank=RANK, key=jax.random.key(2))


KINDS: dict[str, Callable] = {
    "full": lambda model: model,
    "LoRA": partial(_wrap, adapters.lora),
    "DoRA": partial(_wrap, adapters.dora),
    "QLoRA, NF4": lambda model: KINDS["LoRA"](adapters.quantize(model, "nf4")),
    "QLoRA, int8": lambda model: KINDS["LoRA"](adapters.quantize(model, "int8")),
}
"""Adapters by name, each around every linear layer but the head."""
PEFT = ("full", "LoRA", "DoRA")
"""Adapters that PEFT runs on a CPU; its quantized bases need a GPU."""


def steps(
    vs: str, remat: Sequence[Any], dtypes: Sequence[str]
) -> tuple[dict[str, Callable], dict[str, dict[str, Any]]]:
    """Return the entrants of the step, and the memory of each."""
    sizes, entrants, facts = ours.Sizes(), {}, {}
    for dtype in dtypes:
        for kind, adapt in KINDS.items():
            for policy in remat:
                name = f"zoo, {kind}, {dtype}, remat={policy}"
                entrants[name] = run = ours.Training(sizes, dtype, policy, adapt=adapt)
                facts[name] = measure_memory(run) | {"tokens": sizes.batch * sizes.seq}
        if vs == "torch":
            from . import pytorch

            for kind in PEFT:
                name = f"{'torch' if kind == 'full' else 'peft'}, {kind}, {dtype}"
                entrants[name] = rival = pytorch.Adapting(sizes, dtype, kind=kind, rank=RANK)
                facts[name] = {"tokens": sizes.batch * sizes.seq, "bytes_learning": rival.bytes_learning()}
    return entrants, facts


def measure_memory(run: ours.Training) -> dict[str, Any]:
    """Return the bytes of parameters, of gradients and moments, and of the compiled step's temporaries."""
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree) if hasattr(x, "nbytes"))
    learning = size(run.state) + size(zoo.trainable(run.model))
    return {"bytes_parameters": size(run.model), "bytes_learning": learning, **run.executed()}
