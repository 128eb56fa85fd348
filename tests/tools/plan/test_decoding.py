"""Plans of decoding, and of adapters on a frozen base."""

from functools import partial

import jax
import pytest

import zoo
from zoo import adapters
from zoo.parallel.topology import parse_topology
from zoo.tools import plan as planning
from zoo.tools.plan.decoding import suggest_decoding_mesh

SIZES = {"vocab": 256, "embed": 128, "layers": 2, "heads": 2, "mlp": 128}
MAKE = partial(zoo.models.Transformer, **SIZES)


def count_bytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree) if hasattr(x, "nbytes"))


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_decoding_holds_the_bytes_of_the_arrays(quantization):
    model = zoo.cast(MAKE(key=jax.random.key(0)), "bfloat16")
    if quantization:
        model = adapters.quantize(model, quantization)
    options = planning.DecodingOptions(rows=2, length=64, quantization=quantization)
    plan = planning.plan_decoding(MAKE, {}, parse_topology("h100:1"), options)
    assert plan.memory["parameters"] == count_bytes(model)
    assert plan.memory["cache"] == count_bytes(model.init_state(2, 64))
    assert plan.tokens_per_second == {name: 2 / getattr(plan, name) for name in ("lower_bound", "sequential")}
    if not quantization:  # each weight and each slot is read once
        read = count_bytes(model) + plan.memory["cache"]
        assert 0.8 * read < plan.seconds["memory"] * plan.chip.bandwidth < 1.3 * read


def test_decoding_on_a_mesh_shards_heads_and_rows():
    options = planning.DecodingOptions(rows=4, length=64)
    topology = parse_topology("h100:4")
    one = planning.plan_decoding(MAKE, {}, parse_topology("h100:1"), options)
    plan = planning.plan_decoding(MAKE, {"data": 2, "tensor": 2}, topology, options)
    assert 4 * plan.memory["cache"] == pytest.approx(one.memory["cache"], rel=0.02)
    assert {transfer.collective.axes for transfer in plan.transfers} == {("tensor",)}
    with pytest.raises(NotImplementedError, match="plan with pipe=1"):
        planning.plan_decoding(MAKE, {"pipe": 4}, topology, options)
    with pytest.raises(ValueError, match="1 row of 2 tokens is the least"):
        planning.DecodingOptions(rows=0, length=64)


def test_suggested_mesh_decodes_on_as_few_devices_per_row_as_fit(monkeypatch):
    """Rows that four devices do not divide leave tensor 4, or tensor 2 with data 2."""
    topology = parse_topology("h100:4")
    found = suggest_decoding_mesh(MAKE, topology, planning.DecodingOptions(rows=2, length=64))
    assert found.sizes == {"data": 2, "tensor": 2} and found.plan.fits_with_margin
    with pytest.raises(ValueError, match="h100:3 decodes 2 rows"):
        suggest_decoding_mesh(MAKE, parse_topology("h100:3"), planning.DecodingOptions(rows=2, length=64))


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_lora_holds_the_bytes_of_the_arrays(quantization):
    """A frozen base in bfloat16 or 4 bits; adapters, and two moments of each, in float32."""
    base = zoo.cast(MAKE(key=jax.random.key(0)), "bfloat16")
    if quantization:
        base = adapters.quantize(base, quantization)
    model = adapters.lora(base, targets="all-linear", rank=4, key=jax.random.key(1))
    options = planning.TrainingOptions(2, 32, lora=4, quantization=quantization)
    plan = planning.plan_training(MAKE, {}, parse_topology("rtx4090:1"), options)
    assert plan.memory["parameters"] == count_bytes(model)
    assert plan.memory["optimizer state"] - 2 * 4 * zoo.count(model) in range(64)
    assert plan.memory["gradients"] - 4 * zoo.count(model) in range(64)
    assert plan.rewritten == count_bytes(zoo.trainable(model)) + plan.memory["optimizer state"]
    assert plan.model_flops is None and "MFU" not in str(plan)


def test_options_that_do_not_go_together():
    with pytest.raises(ValueError, match="nf4 is for a frozen base: add LoRA"):
        planning.TrainingOptions(1, 16, quantization="nf4")
    with pytest.raises(ValueError, match="the least is 1"):
        planning.TrainingOptions(1, 16, lora=0)
