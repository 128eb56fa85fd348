"""Steps compiled from shapes: as from arrays, and, marked `aot`, for TPUs and H100s that are not here."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from tests.aot import imagine
from zoo import train
from zoo.inspect import compiled, lowering
from zoo.ops.platform import current_platform


@pytest.mark.parametrize("jitted", [True, False])
def test_shapes_report_as_arrays_do(jitted):
    mesh = zoo.make_mesh(data=2, tensor=4)
    shard = lambda x, *spec: jax.device_put(x, jax.NamedSharding(mesh.devices, jax.P(*spec)))
    args = shard(jnp.ones((4, 8)), "data"), {"up": shard(jnp.ones((8, 16)), None, "tensor")}, shard(jnp.ones((3,)))

    def step(x, params, unread, factor=2):
        hidden = x @ params["up"] * factor
        return {"up": params["up"] + x.T @ hidden}, hidden.sum()

    step = eqx.filter_jit(step, donate="all-except-first") if jitted else jax.jit(step, donate_argnums=(1, 2))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), args)
    found, expected = compiled(step, *shapes, factor=3), compiled(step, *args, factor=3)
    for name in ("name", "mesh", "devices", "platform", "flops", "memory", "collectives", "donations", "bytes_moved"):
        assert getattr(found, name) == getattr(expected, name), name
    assert [(row.name, row.aliased, row.used) for row in found.donations] == [
        ("params.up", True, True),
        ("unread", False, False),
    ]
    assert {row.axes for row in found.collectives} == {("data",), ("tensor",)}


def test_shapes_without_shardings_are_for_the_default_device():
    found = compiled(lambda x, y: x @ y, jax.ShapeDtypeStruct((2, 4), "float32"), jnp.ones((4, 2)))
    assert (found.flops.total, found.devices, found.platform) == (32, 1, "cpu")
    assert found.memory.arguments == 64


LAYERS = 3


def compile_step(topology, attention="auto"):
    """Compile the training step of a recipe for fsdp 4 x tensor 2 of a topology; no array is made."""
    mesh = zoo.make_mesh(data=-1, fsdp=4, tensor=2, devices=imagine(topology))
    sizes = {"vocab": 256, "embed": 64, "layers": LAYERS, "heads": 4, "mlp": 128, "dropout": 0.1}

    def make(key):
        return zoo.set_implementations(zoo.models.Transformer(**sizes, key=key), attention=attention)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mask=train.decay_mask))
    platforms = set()

    def loss_fn(model, batch, key):
        platforms.add(current_platform())
        return zoo.cross_entropy(zoo.cast(model, jnp.bfloat16), batch, key=key)

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, model, opt_state):
        key, batch = inputs
        platforms.add(current_platform())
        loss, grads = zoo.value_and_grad(loss_fn, mesh)(model, batch, key=key)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state, loss

    model = zoo.place(eqx.filter_eval_shape(make, jax.random.key(0)), mesh)
    opt_state = zoo.place(jax.eval_shape(optimizer.init, zoo.trainable(model)), mesh.optimizer)
    tokens = jax.ShapeDtypeStruct((16, 128), "int32")
    batch = zoo.place_batch({"tokens": tokens, "targets": tokens}, mesh)
    return compiled(step, (jax.random.key(0), batch), model, opt_state), model, platforms


@pytest.mark.aot
@pytest.mark.parametrize(("topology", "platform"), [("v5e:2x4", "tpu"), ("h100:8", "gpu")])
def test_training_step_compiles_without_hardware(topology, platform):
    found, model, platforms = compile_step(topology, "grouped")
    assert found.platform == platform and platforms == {platform}
    assert found.mesh == {"fsdp": 4, "tensor": 2} and found.devices == 8 and not found.endless

    assert found.chip == topology.partition(":")[0] and 0 < found.exposed_seconds
    assert sum(row.times for row in found.schedule) == sum(row.count for row in found.collectives)
    assert sum(row.bytes for row in found.schedule) == sum(row.bytes for row in found.collectives)

    found.require_donations()
    assert len(found.donations) == 3 * len(jax.tree.leaves(eqx.filter(model, lambda x: hasattr(x, "dtype")))) + 1
    assert found.memory.aliased >= sum(row.bytes for row in found.donations)  # a TPU pads to whole tiles
    assert found.memory.peak > found.memory.arguments

    def total(kind, *axes, of="bytes"):
        return sum(getattr(row, of) for row in found.collectives if (row.kind, row.axes) == (kind, axes))

    # Matrices of the layers and of the embedding, a device's share of tensor, gathered in bfloat16 at least once in
    # each pass; their gradients scattered in float32. Norms are as small as their rounding.
    matrices = LAYERS * (4 * 64 * 64 + 3 * 64 * 128) // 2 + 256 * 64 // 2
    norms = (2 * LAYERS + 1) * 64
    assert 4 * matrices <= total("reduce-scatter", "fsdp") <= 4 * (matrices + norms)
    assert 2 * 2 * matrices - 2 * 256 * 64 // 2 <= total("all-gather", "fsdp") <= 2 * 2 * (matrices + norms)
    # Attention and MLP end with one in the forward pass and begin with one in the backward pass.
    activations = 4 * 128 * 64 * 2  # a device's rows, tokens and features, in bfloat16
    assert total("all-reduce", "tensor") >= 4 * LAYERS * activations
    assert all(row.axes for row in found.collectives)
    assert total("all-gather", "fsdp", of="asynchronous") >= LAYERS


def test_program_of_shapes_is_that_of_the_call():
    """Text for text, so that the compilation cache has the call's program once its shapes were compiled."""
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    make = lambda key: zoo.models.Transformer(vocab=32, embed=16, layers=1, heads=4, mlp=32, key=key)
    model = zoo.init(make, jax.random.key(0), mesh)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model):
        loss, grads = zoo.value_and_grad(lambda model, batch: zoo.cross_entropy(model, batch), mesh)(model, batch)
        return {"model": zoo.place(eqx.apply_updates(model, grads), mesh), "loss": loss}

    tokens = np.zeros((8, 8), np.int32)
    arrays = zoo.place_batch({"tokens": tokens, "targets": tokens}, mesh)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), (arrays, model))
    leaves = jax.tree.leaves(shapes)
    stage = lowering.lower(step, *lowering.trace(step, shapes, {}, leaves), shapes, {}, leaves)
    expected = step.lower(arrays, model).lowered.as_text()
    assert stage.as_text() == expected and 'norm.weight"' in expected
