"""Entrants of a contest: training steps, mixtures of experts, grouped products and decoding, ours and PyTorch's."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from zoo.ops.moe import grouped_matmul

from . import ours

Row = dict[str, Any]
Entrants = tuple[dict[str, Callable], dict[str, Row]]
"""Callables by name, and FLOPs, bytes, tokens and rivals of each."""

NEW_TOKENS = 128
"""Tokens generated after the prompt when decoding."""


def steps(vs: str, remat: Sequence[Any], loops: Sequence[Any], dtypes: Sequence[str]) -> Entrants:
    """Return the entrants of the training step, and the FLOPs and tokens of each."""
    sizes, entrants, facts = ours.Sizes(), {}, {}
    for dtype in dtypes:
        for policy, loop in itertools.product(remat, loops):
            name = f"zoo, {dtype}, remat={policy}{name_loop(loop)}"
            entrants[name], facts[name] = our_step(sizes, dtype, policy, loop)
        if vs == "torch":
            from . import pytorch

            for compiled in (False, True):
                name = f"torch, {dtype}, {'compiled' if compiled else 'eager'}"
                entrants[name] = pytorch.Training(sizes, dtype, compiled=compiled)
                facts[name] = work(sizes, dtype)
            name_rivals(facts, f"zoo, {dtype}", f"torch, {dtype}")
    return entrants, facts


def name_rivals(facts: dict[str, Row], start: str, theirs: str) -> None:
    """Compare every entrant whose name starts with `start` with the best of those whose name starts with `theirs`."""
    for name in facts:
        if name.startswith(start):
            facts[name]["rivals"] = tuple(rival for rival in facts if rival.startswith(theirs))


def mixtures(vs: str, remat: Sequence[Any], loops: Sequence[Any], dtypes: Sequence[str]) -> Entrants:
    """Return the entrants of the mixture's step, and of the dense model with as many active parameters."""
    sizes, dense, entrants, facts = ours.MIXTURE, ours.Sizes(), {}, {}
    for dtype in dtypes:
        for policy, loop in itertools.product(remat, loops):
            for kind, own in (("mixture", sizes), ("dense", dense)):
                name = f"zoo {kind}, {dtype}, remat={policy}{name_loop(loop)}"
                entrants[name], facts[name] = our_step(own, dtype, policy, loop)
        if vs == "torch":
            from . import pytorch

            for experts, compiled in (("eager", False), ("grouped_mm", False), ("grouped_mm", True)):
                name = f"torch mixture, {dtype}, {experts}{', compiled' if compiled else ''}"
                entrants[name] = pytorch.Training(sizes, dtype, compiled=compiled, experts=experts)
                facts[name] = work(sizes, dtype)
            name_rivals(facts, f"zoo mixture, {dtype}", f"torch mixture, {dtype}")
    return entrants, facts


def name_loop(loop: Any) -> str:
    """Return the end of an entrant's name, for another loop over layers than the default."""
    return "" if loop == "auto" else f", loop={loop}"


def our_step(sizes: ours.Sizes, dtype: str, policy: Any, loop: Any) -> tuple[Callable, Row]:
    run = ours.Training(sizes, dtype, policy, loop=loop)
    return run, work(sizes, dtype) | run.executed()


def work(sizes: ours.Sizes, dtype: str) -> Row:
    """Return the FLOPs and tokens of a step, the same for all entrants."""
    return {"dtype": dtype, "flops": sizes.model_flops, "tokens": sizes.batch * sizes.seq}


def grouped_products() -> Entrants:
    """Return the entrants of the grouped product: even and uneven loads, idle experts, the dense product of the same
    size, and `lax.ragged_dot`."""
    form, dealt, entrants, facts = grouped_matmul.grouped_matmul, ours.loads, {}, {}
    for gradient in (False, True):
        also = ", with gradient" if gradient else ""
        kinds = {
            "dense, 8 of 512 rows": (ours.batched, dealt(8, 8)),
            "8 experts, 512 rows each": (form, dealt(8, 8)),
            "8 experts, 114 to 910 rows": (form, dealt(8, 8, uneven=True)),
            "64 experts, 64 rows each": (form, dealt(64, 64)),
            "64 experts, 512 rows for 8 of them": (form, dealt(64, 8)),
            "lax.ragged_dot, 8 experts, 512 rows each": (grouped_matmul.grouped_matmul_ragged, dealt(8, 8)),
        }
        for name, (kind, loads) in kinds.items():
            entrants[name + also] = run = ours.GroupedMatmul(kind, loads, gradient=gradient)
            facts[name + also] = {"dtype": "float32", "flops": run.flops, "tokens": run.ROWS}
    return entrants, facts


def decoding(vs: str) -> Entrants:
    sizes, new, entrants, facts = ours.Sizes(), NEW_TOKENS, {}, {}
    for batch in (1, 8):
        name = f"zoo, batch {batch}"
        entrants[name] = run = ours.Decoding(sizes, batch, new=new)
        facts[name] = {"bytes_needed": run.bytes_a_token() * new, "tokens": batch * new}
        if vs == "torch":
            from . import pytorch

            entrants[f"transformers, batch {batch}"] = pytorch.Decoding(sizes, batch, new=new)
            facts[f"transformers, batch {batch}"] = dict(facts[name])
            name_rivals(facts, name, f"transformers, batch {batch}")
    return entrants, facts
