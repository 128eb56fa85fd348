"""A step, compiled and not run: what it says is what a person counts."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from zoo import train
from zoo.inspect import DonationError, compiled

LAYERS = 2, 4


def program(layers, microbatches=1):
    """The step of a recipe, data 2 x fsdp 2 x tensor 2, and what it was compiled for."""
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    sizes = {"vocab": 32, "embed": 16, "layers": layers, "heads": 4, "mlp": 32}
    model = zoo.init(lambda key: zoo.models.Transformer(**sizes, key=key), jax.random.key(0), mesh)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mask=train.decay_mask))
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
    tokens = jnp.zeros((8, 8), jnp.int32)
    batch = zoo.place_batch({"tokens": tokens, "targets": tokens}, mesh)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        gradient = zoo.value_and_grad(
            lambda model, batch: zoo.cross_entropy(model, batch), mesh, microbatches=microbatches
        )
        loss, grads = gradient(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state, loss

    args = batch, model, opt_state
    return compiled(step, *args), args, step


@pytest.fixture(scope="module")
def shallow():
    return program(LAYERS[0])


@pytest.fixture(scope="module")
def deep():
    return program(LAYERS[1])[0]


@pytest.fixture(scope="module")
def in_parts():
    return program(LAYERS[0], microbatches=2)[0]


def total(found, kind, *axes, of="count"):
    return sum(getattr(one, of) for one in found.collectives if (one.kind, one.axes) == (kind, axes))


def test_sums_over_tensor_are_those_of_the_layers(shallow, deep):
    # Forward, attention and MLP each end with one. Backward each begins with one: of the gradients of what its first
    # matrices read, several arrays, which XLA combines.
    more = LAYERS[1] - LAYERS[0]
    assert total(deep, "all-reduce", "tensor") - total(shallow[0], "all-reduce", "tensor") == 4 * more
    # A row of the batch is 8 tokens, 16 wide; a device has two of them.
    each = total(deep, "all-reduce", "tensor", of="bytes") - total(shallow[0], "all-reduce", "tensor", of="bytes")
    assert each % (more * 2 * 8 * 16 * 4) == 0 and each >= 4 * more * 2 * 8 * 16 * 4


def test_parameters_are_gathered_and_gradients_scattered_over_fsdp(shallow, deep):
    more, arrays = LAYERS[1] - LAYERS[0], 9  # of a block: two norms, four matrices of attention, three of the MLP
    scattered = total(deep, "reduce-scatter", "fsdp", of="arrays") - total(
        shallow[0], "reduce-scatter", "fsdp", of="arrays"
    )
    gathered = total(deep, "all-gather", "fsdp", of="arrays") - total(shallow[0], "all-gather", "fsdp", of="arrays")
    assert scattered == arrays * more
    assert arrays * more < gathered <= 2 * arrays * more  # again in the backward pass, but for what it does not need
    matrices = (4 * 16 * 16 + 3 * 16 * 32) // 2 + 2 * 16  # on a device, heads and MLP being split over tensor
    sent = total(deep, "reduce-scatter", "fsdp", of="bytes") - total(shallow[0], "reduce-scatter", "fsdp", of="bytes")
    assert sent == 4 * more * matrices


def test_gradients_are_summed_over_data_once(shallow, deep, in_parts):
    for found in (shallow[0], deep, in_parts):
        assert total(found, "all-reduce", "data") == 1
    assert all(one.axes for one in deep.collectives)


def test_microbatches_take_the_layers_again(shallow, deep, in_parts):
    per_layer = (total(deep, "all-reduce", "tensor") - total(shallow[0], "all-reduce", "tensor")) / (
        LAYERS[1] - LAYERS[0]
    )
    again = total(in_parts, "all-reduce", "tensor") - total(shallow[0], "all-reduce", "tensor")
    assert again >= per_layer * LAYERS[0]
    assert in_parts.flops == shallow[0].flops and not in_parts.endless


def test_flops_on_a_mesh_are_those_of_one_device(shallow, deep):
    rows, seq, vocab, embed, mlp = 8, 8, 32, 16, 32
    per_layer = 3 * 2 * rows * seq * (4 * embed**2 + 3 * embed * mlp)
    found = (deep.flops.total - shallow[0].flops.total) / (LAYERS[1] - LAYERS[0])
    assert (
        per_layer < found <= per_layer + 3 * 2 * rows * seq * 2 * seq * embed
    )  # attention's own: of all keys, at most
    head = 3 * 2 * rows * seq * embed * vocab
    assert shallow[0].flops.total == LAYERS[0] * found + head


def test_memory_and_traffic(shallow, deep):
    found, args, _ = shallow
    arrays = jax.tree.leaves(eqx.filter(args, eqx.is_array))
    assert found.memory.arguments == sum(x.addressable_shards[0].data.nbytes for x in arrays)
    assert found.memory.aliased == sum(one.bytes for one in found.donations)
    assert found.memory.total > found.memory.temporaries > 0
    layer = 4 * ((4 * 16 * 16 + 3 * 16 * 32) // 2 + 2 * 16)  # read at least forward and backward, and written once
    assert deep.bytes_moved - found.bytes_moved > 3 * layer * (LAYERS[1] - LAYERS[0])


def test_what_a_step_donates_is_taken_over(shallow):
    found, (_, model, opt_state), _ = shallow
    found.require_donations()
    names = [one.name for one in found.donations]
    assert len(names) == len(jax.tree.leaves(eqx.filter((model, opt_state), eqx.is_array)))
    assert "model.stack.segments.0.blocks.0.mixer.query.weight" in names
    query = next(one for one in found.donations if one.name.endswith("blocks.0.mixer.query.weight"))
    assert (query.bytes, query.aliased, query.used) == (LAYERS[0] * 16 * 16 * 4 // 4, True, True)
    assert not any(name.startswith("batch") for name in names)


def test_calling_the_step_compiles_nothing_more(shallow):
    _, (batch, *donated), step = shallow
    donated = jax.block_until_ready(jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, donated))
    seen = []

    def note(event, *_, **__):
        seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        jax.block_until_ready(step(batch, *donated))
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert not [event for event in seen if event.startswith("/jax/core/compile")]


@pytest.mark.parametrize("devices", [1, 8])
def test_a_donation_that_fails_is_told_by_name(devices):
    mesh = zoo.make_mesh(data=-1, devices=jax.devices()[:devices])
    fresh = lambda *shape: zoo.place_batch(jnp.ones(shape), mesh)

    @eqx.filter_jit(donate="all")
    def step(weight, moments, *rest, seen):
        return weight + 1, moments["first"].sum(), rest[0] * 2

    found = compiled(step, fresh(8, 4), {"first": fresh(8, 2), "unread": fresh(16)}, fresh(8), seen=fresh(8, 3))
    assert {one.name: (one.aliased, one.used) for one in found.donations} == {
        "weight": (True, True),
        "moments.first": (False, True),
        "moments.unread": (False, False),
        "rest.0": (True, True),
        "seen": (False, False),
    }
    with pytest.raises(DonationError, match=r"step donates 3 arrays whose buffers no output reuses") as raised:
        found.require_donations()
    assert f"  moments.first: {64 // devices} bytes\n" in f"{raised.value}\n"
    assert f"  seen: {96 // devices} bytes, never read\n" in f"{raised.value}\n"
    assert "not reused: moments.first" in str(found)


def test_axes_are_found_whatever_the_order_of_the_devices():
    devices = np.array(jax.devices())[[3, 6, 0, 5, 2, 7, 1, 4]].reshape(2, 2, 2)
    mesh = jax.sharding.Mesh(devices, ("a", "b", "c"))
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, ("a", "c")), mesh=mesh, in_specs=jax.P(("a", "b", "c")), out_specs=jax.P("b")
    )
    for args in (jnp.ones(8), jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, jax.P(("a", "b", "c"))))):
        (found,) = compiled(total, args).collectives
        assert (found.kind, found.axes, found.count, found.bytes) == ("all-reduce", ("a", "c"), 1, 4)


def test_every_kind_of_function():
    x = jnp.ones((4, 4))
    plain = compiled(lambda x: x @ x, x)
    assert plain.flops.total == 128 and plain.mesh == {} and plain.devices == 1 and not plain.donations
    jitted = compiled(jax.jit(lambda state, scale: (state * scale, 0), donate_argnums=0), x, 2.0)
    assert [(one.name, one.aliased) for one in jitted.donations] == [("state", True)]

    class Odd:
        lower = None

        def __call__(self, x):
            return x + 1

    with pytest.raises(TypeError, match=r"Odd is not one jitted function: pass that of eqx.filter_jit or jax.jit"):
        compiled(Odd(), x)
    with pytest.raises(TypeError, match=r"takes arrays, as the step does"):
        compiled(lambda x: x, jax.ShapeDtypeStruct((2,), jnp.float32))


def test_the_compilation_cache_is_told():
    def make():
        def step_for_the_cache(x):
            return (x @ x).sum()

        return eqx.filter_jit(step_for_the_cache)

    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    try:
        compiled(make(), jnp.ones((3, 3)))
        assert compiled(make(), jnp.ones((3, 3))).seconds.cached
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def test_it_prints_and_goes_into_json(shallow):
    found = shallow[0]
    assert json.loads(json.dumps(found.as_dict()))["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert found.text.startswith("HloModule") and "text" not in found.as_dict()
    lines = str(found).splitlines()
    assert lines[0].split() == "step data 2 x fsdp 2 x tensor 2: 8 devices".split()
    assert [line.split()[0] for line in lines[:7]] == [
        *("step", "seconds", "compute", "traffic", "memory", "donated", "collectives")
    ]
    assert any(line.split()[:2] == ["reduce-scatter", "fsdp"] for line in lines)
