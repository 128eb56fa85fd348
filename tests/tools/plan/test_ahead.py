"""Advice on gathering ahead: it needs gathers to hide, products that take longer, and a compiler that does it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import zoo
from zoo.inspect.exposed_communication import ScheduledCollective
from zoo.inspect.format import Rows
from zoo.parallel import ZERO1
from zoo.parallel.topology import parse_topology
from zoo.tools import plan as planning
from zoo.tools.plan.ahead import compare_loops, find_overlap
from zoo.tools.plan.format import format_plan
from zoo.tools.plan.search import make_stand_in_mesh
from zoo.tools.plan.step import Overlap
from zoo.tools.plan.training import make_training_step

TOPOLOGY = parse_topology("h100:2")
OPTIONS = planning.TrainingOptions(rows=16, seq=256)


def make_small(key, layers=2):
    return zoo.models.Transformer(vocab=64, embed=32, layers=layers, heads=2, mlp=64, key=key)


@pytest.fixture(scope="module")
def step():
    """A plan, its model and its mesh."""
    mesh = make_stand_in_mesh({"fsdp": 2}, TOPOLOGY)
    function, args = make_training_step(make_small, mesh, OPTIONS)
    return zoo.plan(function, *args, on=TOPOLOGY), args[1], mesh


def test_overlap_sums_what_moves_parameters(step):
    plan, model, mesh = step
    overlap = find_overlap(plan, model, mesh)
    moved = {x.collective.kind: x for x in plan.transfers}
    assert moved["all-gather"].collective.axes == moved["reduce-scatter"].collective.axes == ("fsdp",)
    assert overlap is not None and overlap.products == plan.seconds["products"]
    assert overlap.transfers == moved["all-gather"].seconds + moved["reduce-scatter"].seconds < overlap.products

    plan = dataclasses.replace(plan, overlap=Overlap(0.121, 0.251))
    (line,) = [line for line in format_plan(plan).splitlines() if line.startswith("loop")]
    assert line.startswith("loop        gathers and scatters 0.121 s, products 0.251 s: ")
    assert plan.as_dict()["overlap"] == {"transfers": 0.121, "products": 0.251}


@pytest.mark.parametrize("options", [{"loop": "ahead"}, {"loop": "plain"}, {"remat": "dots"}])
def test_overlap_is_for_scans_that_can_gather_ahead(step, options):
    plan, model, mesh = step
    assert find_overlap(plan, zoo.configure(model, **options), mesh) is None


def test_overlap_is_for_transfers_that_products_can_hide(step):
    """Neither for transfers that take longer than the products, nor for those that the scan hides."""
    plan, model, mesh = step

    def scale(factor):
        transfers = tuple(dataclasses.replace(x, seconds=factor * x.seconds) for x in plan.transfers)
        return find_overlap(dataclasses.replace(plan, transfers=transfers), model, mesh)

    overlap = find_overlap(plan, model, mesh)
    assert overlap is not None
    share = overlap.products / overlap.transfers
    # The two layers gather three times in a pass.
    assert scale(0.65 * share) is not None and scale(0.68 * share) is None
    assert scale(0.14 * share) is not None and scale(0.13 * share) is None


def test_overlap_is_for_gpus_and_gathered_parameters(step):
    plan, model, mesh = step
    assert find_overlap(dataclasses.replace(plan, chip=planning.CHIPS["v5e"]), model, mesh) is None
    assert find_overlap(plan, model, make_stand_in_mesh({"fsdp": 2}, TOPOLOGY, ZERO1)) is None
    one_layer = jax.eval_shape(lambda key: make_small(key, layers=1), jax.random.key(0))
    assert find_overlap(plan, zoo.configure(one_layer, remat="full"), mesh) is None


def test_planned_step_gathers_ahead():
    options = dataclasses.replace(OPTIONS, loop="ahead")
    plan = planning.plan_training(make_small, {"fsdp": 2}, TOPOLOGY, options, model_flops=1)
    assert plan.overlap is None and "remat full, loop ahead, bfloat16" in " ".join(format_plan(plan).split())


def make_report(exposed):
    """A report of a program with so many seconds exposed."""
    report = zoo.inspect.compiled(lambda x: x @ x, jnp.ones((4, 4)))
    row = ScheduledCollective(8, 1, "all-gather", ("fsdp",), 0, exposed, 0.0, exposed, "g", "forward", "", "")
    assert report.memory is not None
    memory = dataclasses.replace(report.memory, peak=2 * 10**9)
    return dataclasses.replace(report, chip="h100", schedule=Rows([row]), memory=memory)


def test_loops_are_compared_by_what_is_exposed():
    scan = make_report(0.0331)
    line = compare_loops(scan, make_report(0.0139))
    assert line.startswith("0.0139 s exposed and 2 GB at the peak by gathering ahead, 0.0331 s exposed and ")
    assert line.endswith(': take zoo.configure(model, remat="full", loop="ahead")')
    assert compare_loops(scan, make_report(0.0965)).endswith(" by the scan: keep the scan")
