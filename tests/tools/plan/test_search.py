"""Search for a mesh: its sizes share out devices and experts, and the best plan comes first."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import equinox as eqx
import jax
import pytest

import zoo
from zoo.parallel.mesh import format_sizes
from zoo.parallel.topology import parse_topology
from zoo.tools import plan as planning
from zoo.tools.plan.search import Candidate, _count_experts, iterate_sizes, suggest_mesh

SIZES = {"vocab": 64, "embed": 16, "layers": 2, "heads": 2, "mlp": 16}
MIXTURE = partial(zoo.models.MixtureOfExperts, **SIZES, experts=4, top=2)
TOPOLOGY, OPTIONS = parse_topology("h100:2"), planning.TrainingOptions(rows=8, seq=16)


@pytest.mark.parametrize(("make", "experts"), [(partial(zoo.models.Transformer, **SIZES), 1), (MIXTURE, 4)])
def test_experts_are_counted_by_their_dim(make, experts):
    shapes = eqx.filter_eval_shape(lambda key: make(key=key), jax.random.key(0))
    assert _count_experts(shapes) == experts
    assert any(sizes["expert"] == 2 for sizes in iterate_sizes(TOPOLOGY, OPTIONS, experts)) == (experts > 1)


def test_search_returns_the_best_mesh_first():
    lines: list[str] = []
    make = partial(zoo.models.Transformer, **SIZES)
    found = planning.search_meshes(make, TOPOLOGY, OPTIONS, limit=2, progress=lines.append)
    ranks = [candidate.rank for candidate in found]
    assert len(ranks) == 2 and ranks == sorted(ranks)
    assert lines[0].startswith("mesh 1 of 2: ") and len(lines) == 2
    assert {line.split(": ")[1] for line in lines} == {format_sizes(candidate.sizes) for candidate in found}
    for candidate in found:
        assert {axis: candidate.plan.program.shape[axis] for axis in candidate.sizes} == candidate.sizes


def test_meshes_that_barely_fit_come_after_those_with_room():
    def make(name, fits, room, seconds):
        return Candidate({name: 1}, SimpleNamespace(fits=fits, fits_with_margin=room, sequential=seconds))

    found = [make("no", False, False, 1), make("barely", True, False, 2), make("slow", True, True, 4)]
    found.append(make("fast", True, True, 3))
    ordered = sorted(found, key=lambda candidate: candidate.rank)
    assert [next(iter(candidate.sizes)) for candidate in ordered] == ["fast", "slow", "barely", "no"]


@pytest.mark.one_case("slow")
@pytest.mark.parametrize(
    ("memory", "mesh"), [(10**9, "data 2"), (180_000, "fsdp 2"), (145_000, "data 2"), (120_000, "fsdp 2")]
)
def test_suggestion_fits_with_a_margin_if_one_does(memory, mesh, monkeypatch):
    """The peaks are about 140 kB along data and 106 kB along fsdp: of 180 kB the first leaves less than 30%, and of 145
    kB both do."""
    monkeypatch.setitem(planning.CHIPS, "h100", dataclasses.replace(planning.CHIPS["h100"], memory=memory))
    found = suggest_mesh(partial(zoo.models.Transformer, **SIZES), TOPOLOGY, OPTIONS)
    assert (format_sizes(found.sizes), found.plan.fits) == (mesh, True)


@pytest.mark.ci
def test_suggestion_falls_back_to_the_search(monkeypatch):
    monkeypatch.setitem(planning.CHIPS, "h100", dataclasses.replace(planning.CHIPS["h100"], memory=100_000))
    make = partial(zoo.models.Transformer, **SIZES)
    found = suggest_mesh(make, TOPOLOGY, OPTIONS)
    assert not found.plan.fits
    assert found.sizes == planning.search_meshes(make, TOPOLOGY, OPTIONS)[0].sizes


@pytest.mark.ci
def test_suggestion_for_lora_counts_a_frozen_base(monkeypatch):
    """A memory that the moments of full training alone would exceed holds the adapters and a base in bfloat16."""
    make = partial(zoo.models.Transformer, **SIZES)
    full = planning.plan_training(make, {"fsdp": 2}, TOPOLOGY, OPTIONS)
    options = dataclasses.replace(OPTIONS, lora=2)
    peak = planning.plan_training(make, {"data": 2}, TOPOLOGY, options).peak
    assert peak < full.peak
    monkeypatch.setitem(planning.CHIPS, "h100", dataclasses.replace(planning.CHIPS["h100"], memory=2 * peak))
    found = suggest_mesh(make, TOPOLOGY, options)
    assert (format_sizes(found.sizes), found.plan.fits_with_margin, found.plan.peak) == ("data 2", True, peak)
    monkeypatch.setitem(planning.CHIPS, "h100", dataclasses.replace(planning.CHIPS["h100"], memory=1000))
    found = suggest_mesh(make, TOPOLOGY, options)
    assert (format_sizes(found.sizes), found.plan.fits) == ("fsdp 2", False)
    with pytest.raises(ValueError, match="1 row and 2 micro-batches divide evenly over no mesh"):
        suggest_mesh(make, TOPOLOGY, dataclasses.replace(options, rows=1, microbatches=2))
    with pytest.raises(ValueError, match="the search estimates training of all parameters: plan LoRA on a mesh"):
        planning.search_meshes(make, TOPOLOGY, options)


def test_search_says_why_no_mesh_takes_a_step(monkeypatch):
    make = partial(zoo.models.Transformer, **SIZES)
    odd = partial(zoo.models.Transformer, vocab=64, embed=18, layers=2, heads=3, mlp=15)
    with pytest.raises(ValueError, match="h100:2 takes this training step: .*3 heads do not divide evenly"):
        planning.search_meshes(odd, TOPOLOGY, dataclasses.replace(OPTIONS, rows=1))
    with pytest.raises(ValueError, match="1 row and 2 micro-batches divide evenly over no mesh of it"):
        planning.search_meshes(make, TOPOLOGY, dataclasses.replace(OPTIONS, rows=1, microbatches=2))
    monkeypatch.setitem(planning.CHIPS, "h100", dataclasses.replace(planning.CHIPS["h100"], memory=1000))
    with pytest.raises(ValueError, match="parameters, gradients and moments fit on no mesh of it"):
        planning.search_meshes(make, TOPOLOGY, OPTIONS)
