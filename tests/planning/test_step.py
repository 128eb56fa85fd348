"""Plans: memory at rest equals that of the compiled program, and what does not fit is refused."""

from functools import partial

import pytest

import zoo
from zoo import planning
from zoo.parallel.topology import parse_topology


def test_plan_equals_compiled_program():
    """Arguments to the byte."""
    make = partial(zoo.models.Transformer, vocab=64, embed=32, layers=2, heads=4, mlp=64)
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    step, args = planning.make_training_step(make, mesh, planning.TrainingOptions(8, 16, dtype="float32", remat="none"))
    plan = planning.plan(step, *args, on="h100:8")
    program = zoo.inspect.compiled(step, *args)
    assert program.memory is not None and sum(plan.program.arguments.values()) == program.memory.arguments
    assert plan.fits and 0 < plan.overlapped <= plan.sequential
    with pytest.raises(ValueError, match="mesh of 8 devices, .* and h100:2x8 has 16"):
        planning.plan(step, *args, on="h100:2x8")


def test_plan_of_a_model_that_is_too_large():
    make = partial(zoo.models.preset, "llama3-8b", num_hidden_layers=2)
    topology = parse_topology("v5e:1x1")
    plan = planning.plan_training(make, {}, topology, planning.TrainingOptions(1, 128), model_flops=1)
    assert not plan.fits
    with pytest.raises(planning.BudgetError, match="at the peak, and v5e has 16 GB"):
        plan.require_fit()
