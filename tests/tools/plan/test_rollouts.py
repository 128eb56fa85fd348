"""Memory while sampling: caches and states as `init_state` makes them, and the sampler's copy, per device."""

import dataclasses
import math
from functools import partial

import equinox as eqx
import jax
import pytest

import zoo
from zoo.parallel.topology import parse_topology
from zoo.tools import plan as planning
from zoo.tools.plan.options import RolloutOptions
from zoo.tools.plan.rollouts import count_sampling_memory
from zoo.tools.plan.step import BudgetError

SIZES = {"vocab": 64, "embed": 32, "layers": 3}
MODELS = {
    "transformer": partial(zoo.models.Transformer, **SIZES, heads=4, kv_heads=2, mlp=64, windows=(40, None, None)),
    "mamba2": partial(zoo.models.Mamba2, **SIZES, head_dim=16, groups=2, state_dim=16),
}


def count_bytes(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree) if hasattr(x, "shape"))


@pytest.mark.parametrize("name", MODELS)
def test_one_device_holds_the_states_of_all_rows(name):
    """A length of 130 is a bucket of 192 slots."""
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    model = zoo.place(eqx.filter_eval_shape(lambda key: MODELS[name](key=key), jax.random.key(0)), mesh)
    found = count_sampling_memory(model, mesh, RolloutOptions(12, 130), "bfloat16")
    copy = eqx.filter_eval_shape(lambda model: zoo.cast(model, "bfloat16"), model)
    states = eqx.filter_eval_shape(lambda model: model.init_state(12, 192), copy)
    assert found == {"sampler": count_bytes(copy), "cache": count_bytes(states)}
    if name == "transformer":
        full = count_sampling_memory(model, mesh, RolloutOptions(12, 192), "bfloat16")
        assert full == found and found["cache"] > 12 * (2 * 192 + 40) * 2 * 2 * 8 * 2


@pytest.mark.parametrize("name", MODELS)
def test_a_mesh_shards_rows_heads_and_parameters(name):
    """Four devices share the rows, of which one more is computed, and two the heads."""
    counts = {}
    for sizes, devices in (({"data": 1}, 1), ({"data": 2, "fsdp": 2, "tensor": 2}, 8), ({"fsdp": 4, "tensor": 2}, 8)):
        mesh = zoo.make_mesh(**sizes, devices=jax.devices()[:devices])
        model = zoo.place(eqx.filter_eval_shape(lambda key: MODELS[name](key=key), jax.random.key(0)), mesh)
        rows = 12 if devices == 1 else 11
        counts[str(mesh)] = count_sampling_memory(model, mesh, RolloutOptions(rows, 130))
    one, both, sharded = counts.values()
    assert one["cache"] / 8 <= both["cache"] <= one["cache"] / 4 and both["cache"] == sharded["cache"]
    if name == "mamba2":  # states and convolutions only
        assert both["cache"] == one["cache"] / 8
    assert one["sampler"] / 4.5 < both["sampler"] < one["sampler"] / 3
    assert one["sampler"] / 9 < sharded["sampler"] < one["sampler"] / 6


@pytest.mark.ci
def test_generate_holds_what_is_counted():
    """The states in a prefix, which `zoo.generate` returns, on a mesh with `context`, which shards slots."""
    mesh = zoo.make_mesh(data=2, context=2, tensor=2)
    model = zoo.init(lambda key: MODELS["transformer"](key=key), jax.random.key(0), mesh)
    tokens = jax.numpy.ones((4, 100), int)
    options = {"max_new_tokens": 30, "samples": 3, "mesh": mesh, "details": True}
    states = zoo.generate(model, tokens, **options).prefix.states
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(states))
    found = count_sampling_memory(model, mesh, RolloutOptions(12, 130))
    assert found["cache"] == held


def test_a_plan_counts_sampling_between_steps():
    """Never together with activations, and it may be what does not fit."""
    topology = parse_topology("h100:2")
    options = planning.TrainingOptions(2, 16, rollouts=RolloutOptions(64, 1024))
    plan = planning.plan_training(MODELS["transformer"], {"fsdp": 2}, topology, options, model_flops=1)
    memory = plan.sampling_memory
    assert list(memory) == ["parameters", "optimizer state", "sampler", "cache"]
    assert memory["parameters"] == plan.memory["parameters"] and memory["cache"] > plan.peak
    assert sum(plan.memory.values()) == plan.peak
    text = str(plan)
    assert "sampling    64 rows of 1,024 tokens, " in text and ": fits\n" in text.partition("sampling")[2]
    assert plan.as_dict()["sampling_memory"] == memory
    chip = dataclasses.replace(plan.chip, memory=sum(memory.values()) - 1)
    small = dataclasses.replace(plan, chip=chip)
    assert (
        not small.fits and "memory      about" in str(small) and "DOES NOT FIT" in str(small).partition("sampling")[2]
    )
    with pytest.raises(BudgetError, match="while sampling, and h100 has .* cache .* Sample fewer rows"):
        small.require_fit()
    plain = planning.plan_training(
        MODELS["transformer"], {"fsdp": 2}, topology, planning.TrainingOptions(2, 16), model_flops=1
    )
    assert plain.sampling_memory == {} and "sampling" not in str(plain) and plain.peak == plan.peak


def test_what_cannot_be_sampled_is_refused(no_type_checks):
    mesh = zoo.make_mesh(data=1, pipe=2, devices=jax.devices()[:2])
    with pytest.raises(NotImplementedError, match="the stages of a pipeline do not sample"):
        count_sampling_memory(None, mesh, RolloutOptions(8, 16))
    with pytest.raises(ValueError, match="0 rows of 16 tokens: 1 row of 2 tokens is the least"):
        RolloutOptions(0, 16)
