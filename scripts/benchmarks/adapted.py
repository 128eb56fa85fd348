"""Steps that learn an adapter, beside the step that learns everything: time, and what is held."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

import zoo
from zoo import adapters

from . import ours

RANK = 8
KINDS: dict[str, Callable] = {
    "full": lambda model: model,
    "LoRA": partial(adapters.lora, targets="all-linear", rank=RANK, key=jax.random.key(2)),
    "DoRA": partial(adapters.dora, targets="all-linear", rank=RANK, key=jax.random.key(2)),
    "QLoRA, NF4": lambda model: KINDS["LoRA"](adapters.quantize(model, "nf4")),
    "QLoRA, int8": lambda model: KINDS["LoRA"](adapters.quantize(model, "int8")),
}
"""What becomes of a model before its step is taken: factors of rank 8 around every matrix but the head's."""
PEFT = ("full", "LoRA", "DoRA")
"""Those that PEFT has on every machine: its quantized bases need kernels of a GPU."""


def steps(
    vs: str, remat: Sequence[Any], dtypes: Sequence[str]
) -> tuple[dict[str, Callable], dict[str, dict[str, Any]]]:
    """Entrants of the step, and what each holds."""
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
    """The bytes of parameters, learnt or not; of what learning adds to them, gradients and moments; and of what else
    the compiled step works in."""
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree) if hasattr(x, "nbytes"))
    learning = size(run.state) + size(zoo.trainable(run.model))
    return {"bytes_parameters": size(run.model), "bytes_learning": learning, **run.executed()}
