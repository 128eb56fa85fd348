"""The estimate of a plan, by trace alone, against XLA's compilers for TPU v5e and H100: 20 training steps on each.

`compiled.json` has what `scripts/compile_plans.py` read from the compilers. Of each case this compares

- the arguments, to the byte; a TPU pads the smallest, of norms and decays, to tiles of 8 x 128;
- FLOPs, which both count in a jaxpr, and no compiler: on GPUs equal; on TPUs attention's kernel in the compiled step
  states an estimate of its own;
- collectives: bytes by axes, of gathers, of sums, of permutations and of exchanges. Compilers combine several arrays
  into one collective, split one, and make of a reduce-scatter an all-reduce and a slice: numbers and kinds are theirs;
- the peak, within 10%, or within the bound of a case that is named below with its reason.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import pytest

from scripts.compile_plans import compile_case
from scripts.plan_cases import CASES, make_case
from tests.aot import imagine
from zoo import planning
from zoo.parallel.topology import parse_topology

ROWS = {row["name"]: row for row in json.loads(Path(__file__).with_name("compiled.json").read_text(encoding="utf-8"))}
QUICK = ("fsdp",)
"""The case of both compilers that runs by default; tracing all takes minutes."""
SMALL = 2**17
"""Bytes: compilers gather, sum or compute again the arrays of norms, and numbers, as they see fit."""
FAMILIES = {
    **dict.fromkeys(("all-reduce", "reduce-scatter"), "sum"),
    "all-gather": "gather",
    "collective-permute": "permute",
    "all-to-all": "exchange",
}

_AHEAD = "which parts of a peeled layer run before the loss is the scheduler's choice; the estimate takes all"
_GROUPED = "grouped products of experts are loops of unknown length, whose buffers the compiler keeps apart"
_ON_CHIP = "128 MiB of on-chip memory hold residuals that the estimate counts in HBM: as much as this small step has"
_RECURRENT = "chunked recurrences take more on a TPU than the trace has; padding to tiles of 8 x 128 is not modeled"
PEAKS: dict[str, tuple[float, str]] = {
    "h100:8 fsdp, float32": (1.101, _AHEAD),
    "h100:8 expert": (0.867, _GROUPED),
    "h100:8 expert x fsdp": (0.882, _GROUPED),
    "h100:8 pipe x fsdp x tensor": (0.756, "peeled phases of the pipeline each have accumulators of the gradients"),
    "v5e:2x4 expert": (0.893, _GROUPED),
    "v5e:2x4 zero2, micro-batches": (0.792, "not explained: the compiler's temporaries are 47 MB larger"),
    "v5e:2x4 fsdp, no remat": (1.144, _ON_CHIP),
    "v5e:2x4 fsdp, dots": (1.448, _ON_CHIP),
    "v5e:2x4 fsdp, float32": (1.259, _ON_CHIP),
    "v5e:2x4 fsdp, micro-batches": (1.226, _ON_CHIP),
    "v5e:2x4 sequence": (1.160, _ON_CHIP),
    "v5e:2x4 fsdp x tensor": (1.270, _ON_CHIP),
    "v5e:2x4 pipe x fsdp x tensor": (1.140, _ON_CHIP),
    "v5e:2x4 mamba2": (0.711, _RECURRENT),
    "v5e:2x4 hybrid": (0.737, _RECURRENT),
}
"""Estimate over compiled peak where it is not within 10%, and why."""
_LOOKUP = "constants folded, two lookups of tokens are one; indices are not computed here"
_ADDED = "gradients of several micro-batches are added before they are summed"
COLLECTIVES: dict[str, str] = {
    "h100:8 pipe x fsdp x tensor": _LOOKUP,
    "v5e:2x4 pipe x fsdp x tensor": f"{_LOOKUP}; {_ADDED}",
    "v5e:2x4 zero2, micro-batches": _ADDED,
    "v5e:2x4 fsdp, float32": "parameters that are gathered for the forward pass are not all gathered again",
    "v5e:2x4 fsdp, micro-batches": "the arrays of norms, of four micro-batches, are more than SMALL in all",
    "v5e:2x4 hybrid": "a part of the gathers is repeated in the backward pass",
    "v5e:2x4 context": "half of the keys' and values' gathers are not repeated in the backward pass",
}
"""Cases whose collectives differ, and how."""


def choose(cases):
    return [name if name.split(" ", 1)[1] in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in cases]


@pytest.mark.parametrize("name", choose(name for name in CASES if name in ROWS))
def test_plan_equals_compiled_case(name):
    row, topology = ROWS[name], parse_topology(CASES[name].topology)
    step, args = make_case(name, jax.devices("cpu")[:1] * topology.devices)
    plan = planning.plan(step, *args, on=topology)

    difference = sum(plan.program.arguments.values()) - row["arguments"]
    assert difference == 0 if not topology.is_tpu else -0.005 * row["arguments"] < difference <= 0
    assert row["outputs"] - row["aliased"] < 4096, "all but the loss is donated"

    flops = plan.program.work.total_flops * topology.devices / row["flops"]
    assert flops == 1 if not topology.is_tpu else 1 <= flops < 1.15

    ours = sum_families([(x.kind, x.axes or (), x.bytes) for x in plan.program.work.collectives])
    theirs = sum_families([(kind, axes, size) for kind, axes, _, size in row["collectives"]])
    equal = all(abs(ours[key] - theirs[key]) < SMALL for key in {*ours, *theirs})
    assert equal == (name not in COLLECTIVES), f"{dict(ours)} by trace, {dict(theirs)} compiled"

    expected, tolerance = (PEAKS[name][0], 0.02) if name in PEAKS else (1, 0.1)
    assert plan.peak / row["peak"] == pytest.approx(expected, abs=tolerance)


def sum_families(collectives: list[tuple[str, Any, int]]) -> Counter:
    """Sum bytes by what a collective does and the axes of its groups."""
    total: Counter = Counter()
    for kind, axes, size in collectives:
        total[FAMILIES[kind], tuple(axes)] += size
    return total


@pytest.mark.aot
@pytest.mark.parametrize("name", ("h100:8 mamba2", "v5e:2x4 fsdp x tensor"))
def test_stored_case_equals_one_compiled_now(name):
    """The file is what the compilers of the versions in constraints.txt say."""
    imagine(CASES[name].topology)
    row = compile_case(name)
    exact = ("arguments", "aliased", "flops", "collectives")
    assert {key: row[key] for key in exact} == {key: ROWS[name][key] for key in exact}
    assert row["peak"] == pytest.approx(ROWS[name]["peak"], rel=0.02)
