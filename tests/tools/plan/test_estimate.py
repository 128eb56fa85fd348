"""The search finds the best mesh: of all meshes of ten models, traced once, the best is among the twelve it traces.

`python tests/tools/plan/test_estimate.py` traces all of them again, in half an hour of one core.
"""

import json
from functools import partial
from pathlib import Path

import pytest

import zoo
from zoo.parallel.topology import parse_topology
from zoo.tools import plan as planning
from zoo.tools.plan.search import rank_meshes

STORED = Path(__file__).with_name("searched.json")
CASES = json.loads(STORED.read_text(encoding="utf-8"))
LIMIT = 12
"""Meshes that `search_meshes` traces."""


def prepare(case):
    """Return the arguments of a search."""
    make = partial(zoo.models.preset, case["preset"])
    options = planning.TrainingOptions(case["rows"], case["seq"], microbatches=case["microbatches"])
    return make, parse_topology(case["topology"]), options


def rank(row):
    """Order as `Candidate.rank` does."""
    return not row["fits"], not row["fits_with_margin"], row["sequential"]


@pytest.mark.parametrize("name", CASES)
def test_the_best_of_all_meshes_is_among_those_that_are_traced(name):
    make, topology, options = prepare(CASES[name])
    ranked = rank_meshes(make, topology, options)
    rows = CASES[name]["meshes"]
    assert len(ranked) == len(rows) > LIMIT
    best = min(rows, key=rank)
    assert best["sizes"] in ranked[:LIMIT]
    if name == "llama3-8b on h100:8x8":  # the run of the README
        assert best["sizes"] == ranked[0] and best["sizes"]["fsdp"] == 64


def trace(case):
    """Return a row for each mesh that can be built."""
    make, topology, options = prepare(case)
    rows = []
    for sizes in rank_meshes(make, topology, options):
        plan = planning.plan_training(make, sizes, topology, options, model_flops=1)
        times = {"sequential": plan.sequential, "peak": plan.peak}
        rows.append({"sizes": sizes, "fits": plan.fits, "fits_with_margin": plan.fits_with_margin, **times})
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_stored_meshes_are_planned_as_today(name):
    """The best and the last one."""
    make, topology, options = prepare(CASES[name])
    rows = CASES[name]["meshes"]
    for row in (min(rows, key=rank), rows[-1]):
        plan = planning.plan_training(make, row["sizes"], topology, options, model_flops=1)
        assert (plan.sequential, plan.peak) == pytest.approx((row["sequential"], row["peak"]), rel=0.01)


if __name__ == "__main__":
    for case in CASES.values():
        case["meshes"] = trace(case)
    STORED.write_text(json.dumps(CASES, indent=1) + "\n", encoding="utf-8")
