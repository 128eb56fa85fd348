"""ZeRO by its stages, and replicas of shards: memory, collectives and gradients of a compiled AdamW step."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from tests.parallel.scale_problem import loss_fn as scale_loss
from tests.parallel.scale_problem import make_problem
from zoo.parallel import ZERO1, ZERO2, ZERO3

KEY = jax.random.key(0)
LAYERS, MICROBATCHES = 12, 2
OPTIMIZER = optax.adamw(1e-3, b1=0.9)
TEXT = jax.random.randint(KEY, (16, 9), 0, 128)
BATCH = {"tokens": TEXT[:, :-1], "targets": TEXT[:, 1:]}


def make(key):
    sizes = {"vocab": 128, "embed": 128, "layers": LAYERS, "heads": 4, "mlp": 512}
    return zoo.models.Transformer(**sizes, loop="scan", key=key)


def loss_fn(model, batch):
    return zoo.cross_entropy(zoo.cast(model, jnp.float32), batch)


@pytest.fixture(scope="module")
def gradients():
    """Loss and gradients on one device."""
    serial = eqx.filter_value_and_grad(lambda model: jnp.divide(*loss_fn(model, BATCH)))
    return jax.device_get(eqx.filter_jit(serial)(eqx.filter_jit(make)(KEY)))


def run_step(mesh, gradients):
    """Compile one step with micro-batches and take it: the loss and, by the first moment, the gradients are those of
    one device."""

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        loss, grads = zoo.value_and_grad(loss_fn, mesh, microbatches=MICROBATCHES)(model, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, zoo.trainable(model))
        return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state, loss

    model = zoo.init(make, KEY, mesh)
    opt_state = zoo.place(OPTIMIZER.init(zoo.trainable(model)), mesh.optimizer)
    args = zoo.place_batch(BATCH, mesh), model, opt_state
    program = zoo.inspect.compiled(step, *args)
    program.require_donations()
    _, opt_state, loss = step(*args)
    expected_loss, expected = gradients
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    moments = jax.device_get(jax.tree.leaves(opt_state[0].mu))
    for moment, gradient in zip(moments, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(moment / 0.1, gradient, atol=2e-5 * np.abs(gradient).max(), rtol=0)
    return program


def list_collectives(program):
    """Return executions and bytes by kind and axes."""
    return {(row.kind, row.axes): (row.count, row.bytes) for row in program.collectives}


@pytest.mark.slow
def test_zero_stages_have_the_memory_of_their_names(gradients):
    """With n devices and P bytes of parameters: parameters P, P, P / n; sums of gradients P, P / n, P / n; optimizer
    state 2 P / n. A micro-batch has gradients as large as the sums beside them, and `ZERO2` gathers an update of P."""
    size = sum(x.nbytes for x in jax.tree.leaves(gradients[1]))
    programs = [run_step(zoo.make_mesh(fsdp=8, layout=layout), gradients) for layout in (ZERO1, ZERO2, ZERO3)]
    for program, parameters in zip(programs, (size, size, size // 8), strict=True):
        assert 0 <= program.memory.arguments - (parameters + 2 * size // 8) < 2048, "a batch, and a counter of steps"
    temporaries = [program.memory.temporaries / size for program in programs]
    assert 2 < temporaries[0] < 2.5
    assert 1 < temporaries[1] < 1 + 5 / 8
    assert 2 / 8 < temporaries[2] < 4 / 8 + 2 / LAYERS
    scattered = [list_collectives(program)["reduce-scatter", ("fsdp",)] for program in programs]
    matrices_and_norms, table_and_norm = 9 * LAYERS, 3  # a tied table has two gradients
    assert scattered[0] == (9 + 2, size), "each gradient once a step"
    for executions, moved in scattered[1:]:
        assert executions == MICROBATCHES * (matrices_and_norms + table_and_norm), "those of a layer in the loop"
        assert moved == pytest.approx(MICROBATCHES * size, rel=0.02)
    gathered = [list_collectives(program)["all-gather", ("fsdp",)][1] / size for program in programs]
    assert gathered == pytest.approx([1, 1, 2 * MICROBATCHES], rel=0.02), "the update, or parameters in both passes"


@pytest.mark.slow
def test_replicas_of_shards_communicate_over_their_own_axes(gradients):
    """HSDP: parameters move within `fsdp`, and only shards of gradients cross `data`, once."""
    moved = list_collectives(run_step(zoo.make_mesh(data=2, fsdp=4), gradients))
    size = sum(x.nbytes for x in jax.tree.leaves(gradients[1]))
    assert moved.pop(("all-reduce", ("data",))) == (1, size // 4)
    assert moved.pop(("all-reduce", ("data", "fsdp"))) == (1, 8), "the loss and its count"
    assert set(moved) == {("all-gather", ("fsdp",)), ("reduce-scatter", ("fsdp",))}


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"data": 8}, {"data": 2, "fsdp": 4}], ids=str)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_bfloat16_gradients_are_summed_in_float32(sizes, microbatches):
    """The gradient is 256 in the first row and 1 in the others, and a device has one row at a time. In bfloat16 256 + 1
    is 256: a sum over devices or micro-batches would lose ones."""
    rows = 8 * microbatches
    mesh, model, _ = make_problem(rows, **sizes)
    batch = {"x": jnp.ones((rows, 16)).at[0].set(256.0), "weights": jnp.ones(rows)}

    def rounded(model, batch):
        return scale_loss(zoo.cast(model, jnp.bfloat16), batch)

    _, grads = zoo.value_and_grad(rounded, mesh, microbatches=microbatches)(model, batch)
    assert grads.weight.dtype == jnp.float32
    assert jnp.array_equal(grads.weight, jnp.full(16, (256 + rows - 1) / rows))
