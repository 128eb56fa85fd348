"""1F1B equals one device on mixtures of axes, with the memory and the collectives of its formulas."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import zoo
from tests.aot import imagine
from tests.jaxprs import arrays as list_arrays
from tests.parallel.any_mesh import make_any_mesh
from tests.parallel.pipeline_problem import SEQ, assert_equal_to_one_device, loss_fn, make_hybrid, make_transformer
from zoo import Layout
from zoo.layers import TokenInfo
from zoo.models import Hidden, Stack
from zoo.models.decoder import AbstractBlock
from zoo.parallel import SEQUENCE, ZERO2
from zoo.parallel.rounds import merge_rounds
from zoo.parallel.schedule import Schedule

ONE_FORWARD_ONE_BACKWARD = Schedule("1f1b")


class SmallBlock(AbstractBlock):
    """x + tanh(w x + segment id)."""

    weight: Float[Array, "embed"]

    def __call__(self, hidden, info, state=None):
        return hidden.add_residual(jnp.tanh(self.weight * hidden.x + info.segment_ids[..., None])), state

    def init_state(self, batch, length, dtype=jnp.float32):
        return None


def weighted_sum(stack, batch):
    hidden, _ = stack(Hidden(batch["x"]), TokenInfo(segment_ids=batch["ids"]))
    return (hidden.x * batch["weights"]).sum(), jnp.float32(hidden.x.size)


def test_interleaved_small_layers_equal_one_device():
    """Four layers, of which each stage has one in each of two rounds; four micro-batches of two rows."""
    stack = Stack([lambda key: SmallBlock(jax.random.normal(key, (3,)))] * 4, loop="scan", key=jax.random.key(0))
    x, weights = jax.random.normal(jax.random.key(1), (2, 8, 2, 3))
    batch = {"x": x, "weights": weights, "ids": jnp.arange(16).reshape(8, 2) % 5}
    expected_loss, expected = zoo.value_and_grad(weighted_sum, make_any_mesh())(stack, batch)
    mesh = make_any_mesh(Layout(rounds=2), pipe=2)
    run = zoo.value_and_grad(weighted_sum, mesh, microbatches=4, schedule=ONE_FORWARD_ONE_BACKWARD)
    loss, gradients = run(zoo.place(stack, mesh), batch)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (merge_rounds(gradients), expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.slow
def test_1f1b_with_experts_and_context_equals_one_device():
    """In one program: rounds of an exchange of tokens and a ring of keys within a tick, prefixes of a recurrence, the
    sums of routers through the stages, and a layer before them."""
    mesh = make_any_mesh(Layout(expert="boxes"), pipe=2, expert=2, context=2)
    assert_equal_to_one_device(make_hybrid, mesh, microbatches=4, schedule=ONE_FORWARD_ONE_BACKWARD)


def penalized_loss(model, batch, key=None):
    """With a penalty of parameters of all layers."""
    (total, count), aux = loss_fn(model, batch, key)
    (segment,) = zoo.parallel.gather(model).stack.segments
    penalty = zoo.parallel.reduce((segment.blocks[0].mixer_norm.weight ** 2).sum(), over="layers")
    return (total + 0.1 * penalty * count, count), aux


@pytest.mark.slow
def test_interleaved_with_dropout_equals_one_device():
    """Gradients; losses of training steps in rounds are compared in tests/train/test_training_on_meshes.py."""
    mesh = make_any_mesh(Layout(rounds=2), pipe=2, fsdp=2, tensor=2)
    options = {"microbatches": 4, "schedule": ONE_FORWARD_ONE_BACKWARD, "loss": penalized_loss}
    assert_equal_to_one_device(make_transformer, mesh, dropout=True, **options)


@pytest.mark.slow  # recipes/test_pipeline.py trains by it; test_processes.py has the gradient's norm
def test_1f1b_that_keeps_residuals_equals_one_device():
    mesh = make_any_mesh(pipe=4, data=2)
    options = {"microbatches": 8, "schedule": Schedule("1f1b", "residuals")}
    assert_equal_to_one_device(make_transformer, mesh, dropout=True, **options)


def plain_loss(model, batch):
    return zoo.cross_entropy(model, batch)


def make_step(mesh, microbatches, *, rows=4, seq=SEQ, embed=32, loss=plain_loss, name="1f1b", keep="inputs"):
    """Return the gradient of a model of eight layers, two to a stage, and the shapes of its arguments."""
    schedule = Schedule(name, keep)
    model = eqx.filter_eval_shape(partial(make_transformer, layers=8, embed=embed), jax.random.key(0))
    batch = {name: jax.ShapeDtypeStruct((rows * microbatches, seq), "int32") for name in ("tokens", "targets")}
    run = zoo.value_and_grad(loss, mesh, microbatches=microbatches, schedule=schedule)
    return eqx.filter_jit(lambda *args: run(*args)), zoo.place(model, mesh), zoo.place_batch(batch, mesh)


@pytest.mark.slow
def test_memory_and_collectives_by_formula():
    """From twice as many micro-batches as stages to eight times as many, temporaries grow by less than 1%. Over `pipe`
    go two activations in each tick, forward and backward; summed over it are what enters and leaves the stages and the
    gradients of both, of which those of the first stage in each tick, and three numbers a token in the loss."""
    stages, mesh = 4, make_any_mesh(pipe=4, data=2)
    programs = {count: zoo.inspect.compiled(*make_step(mesh, count)) for count in (2 * stages, 8 * stages)}
    few, many = (program.memory.temporaries for program in programs.values())
    assert 0.99 < many / few < 1.01
    tokens = 2 * SEQ
    activation = tokens * 32 * 4
    for count, program in programs.items():
        sums = {(row.kind, row.axes): row for row in program.collectives}
        ticks = 2 * (count + stages - 1)
        permutes, shared = sums["collective-permute", ("pipe",)], sums["all-reduce", ("pipe",)]
        assert (permutes.count, permutes.bytes) == (ticks, ticks * activation)
        activations, scalars = ticks + 2 * count + 1, 3 * count
        assert shared.arrays == activations + scalars
        assert shared.bytes == activations * activation + scalars * tokens * 4
        assert sums["all-reduce", ("data",)].count <= 2, "gradients, once a step, and the loss"


def half_precision_loss(model, batch):
    return plain_loss(zoo.cast(model, jnp.bfloat16), batch)


@pytest.mark.slow
def test_residuals_of_micro_batches_hold_no_weights():
    """What depends on parameters alone, such as their copies in another dtype, is not among what has slots."""
    mesh = make_any_mesh(pipe=4, data=2)
    step, model, batch = make_step(mesh, 8, rows=6, loss=half_precision_loss, keep="residuals")
    jaxpr = jax.make_jaxpr(step)(model, batch).jaxpr
    slots = Schedule("1f1b").table(stages=4, microbatches=8).num_slots
    stored = {x.shape[1:] for x in list_arrays(jaxpr) if x.shape[:1] == (slots,)}
    assert stored.isdisjoint((2, *x.shape[1:]) for x in jax.tree.leaves(model.stack) if x.ndim == 3)
    assert (2, 3, SEQ, 64) in stored, "of two layers and three rows"


def call_twice(model, batch):
    first, second = plain_loss(model, batch), plain_loss(model, batch)
    return first[0] + second[0], first[1]


def call_in_checkpoint(model, batch):
    return eqx.filter_checkpoint(plain_loss)(model, batch)


def call_nothing(model, batch):
    return model.norm.weight.sum() * batch["tokens"].sum(), batch["tokens"].size


@pytest.mark.parametrize(
    "loss, error, message",
    [
        (call_twice, NotImplementedError, "calls the model's layers twice, .* zoo.parallel.Schedule\\('gpipe'\\)"),
        (call_in_checkpoint, NotImplementedError, "inside a transformation .* call the model directly"),
        (call_nothing, ValueError, "does not call the model's layers, .* leave out `schedule`"),
    ],
)
def test_loss_that_cannot_be_cut_raises(loss, error, message):
    step, *args = make_step(make_any_mesh(pipe=2), 4, loss=loss)
    with pytest.raises(error, match=message):
        jax.eval_shape(step, *args)


def test_rounds_refuse_residuals_and_uneven_micro_batches():
    step, *args = make_step(make_any_mesh(Layout(rounds=2), pipe=2), 4, keep="residuals")
    with pytest.raises(NotImplementedError, match='keep="residuals" would keep the weights of a round'):
        jax.eval_shape(step, *args)
    step, *args = make_step(make_any_mesh(Layout(rounds=2), pipe=2), 3)
    with pytest.raises(ValueError, match="microbatches=3: .* multiple of 2"):
        jax.eval_shape(step, *args)


def test_slow_pipelines_warn(caplog):
    step, *args = make_step(make_any_mesh(pipe=4, fsdp=2), 2, name="gpipe")
    jax.eval_shape(step, *args)
    few, gathers = (record.message for record in caplog.records)
    assert (
        few == "pipe=4 with 2 micro-batches leaves the devices idle for 60% of the time: microbatches=16 would for 16%"
    )
    assert gathers.startswith("parameters are sharded over fsdp (ZeRO-3)") and "layout=zoo.parallel.ZERO2" in gathers
    caplog.clear()
    step, *args = make_step(make_any_mesh(ZERO2, pipe=4, fsdp=2), 4, name="gpipe")
    jax.eval_shape(step, *args)
    assert not caplog.records


LAYOUTS = {
    "ZERO2": (ZERO2, {"pipe": 2, "data": 2, "fsdp": 2}),
    "SEQUENCE": (SEQUENCE, {"pipe": 2, "context": 2, "tensor": 2}),
    "heads in rounds": (Layout(context="heads", rounds=2), {"pipe": 2, "data": 2, "context": 2}),
    "vocabulary within stages": (Layout().with_dims(vocab=("tensor",)), {"pipe": 4, "tensor": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout, sizes", LAYOUTS.values(), ids=LAYOUTS)
def test_1f1b_with_other_layouts_equals_one_device(layout, sizes):
    options = {"microbatches": 4, "schedule": ONE_FORWARD_ONE_BACKWARD}
    assert_equal_to_one_device(make_transformer, make_any_mesh(layout, **sizes), dropout=True, **options)


def make_adapted(key):
    """A frozen base of 8 bits with LoRA, whose dropout has sites of its own."""
    model = zoo.adapters.quantize(make_transformer(key), "int8")
    return zoo.adapters.lora(model, targets="all-linear", rank=4, dropout=0.1, key=key)


@pytest.mark.slow
@pytest.mark.parametrize("keep, rounds", [("inputs", 2), ("residuals", 1)])
def test_1f1b_of_adapters_equals_one_device(keep, rounds):
    mesh = make_any_mesh(Layout(rounds=rounds), pipe=2, tensor=2, data=2)
    options = {"microbatches": 4, "schedule": Schedule("1f1b", keep)}
    assert_equal_to_one_device(make_adapted, mesh, dropout=True, **options)


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["v5e:2x4", "h100:8"])
def test_memory_is_flat_on_accelerators(topology):
    mesh = zoo.make_mesh(pipe=4, data=2, devices=imagine(topology))
    sizes = {"seq": 512, "embed": 256}  # smaller ones are all padding on a TPU
    few, many = (zoo.inspect.compiled(*make_step(mesh, count, **sizes)).memory for count in (8, 32))
    assert 0.99 < (many.peak - many.arguments) / (few.peak - few.arguments) < 1.01
