"""Reports of compiled steps equal hand counts: FLOPs, memory, collectives by axis, donation."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from zoo import train
from zoo.inspect import compiled
from zoo.inspect.program import DonationError

LAYERS = 2, 3


def compile_step(layers, microbatches=1):
    """Compile the training step of a recipe on data 2 x fsdp 2 x tensor 2; return report, arguments and step."""
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
    return compile_step(LAYERS[0])


@pytest.fixture(scope="module")
def deep():
    return compile_step(LAYERS[1])[0]


@pytest.fixture(scope="module")
def accumulated():
    return compile_step(LAYERS[0], microbatches=2)[0]


def total(report, kind, *axes, of="count"):
    return sum(getattr(row, of) for row in report.collectives if (row.kind, row.axes) == (kind, axes))


@pytest.mark.slow
def test_tensor_all_reduces_are_those_of_the_layers(shallow, deep):
    # In the forward pass attention and MLP each end with one. In the backward pass each begins with one, of the
    # gradients of its input: several arrays, which XLA combines.
    more = LAYERS[1] - LAYERS[0]
    assert total(deep, "all-reduce", "tensor") - total(shallow[0], "all-reduce", "tensor") == 4 * more
    # A row of the batch has 8 tokens of 16 features; a device has two rows.
    each = total(deep, "all-reduce", "tensor", of="bytes") - total(shallow[0], "all-reduce", "tensor", of="bytes")
    assert each % (more * 2 * 8 * 16 * 4) == 0 and each >= 4 * more * 2 * 8 * 16 * 4


@pytest.mark.ci
def test_fsdp_gathers_parameters_and_scatters_gradients(shallow, deep):
    more, arrays = LAYERS[1] - LAYERS[0], 9  # of a block: two norms, four matrices of attention, three of the MLP
    scattered = total(deep, "reduce-scatter", "fsdp", of="arrays") - total(
        shallow[0], "reduce-scatter", "fsdp", of="arrays"
    )
    gathered = total(deep, "all-gather", "fsdp", of="arrays") - total(shallow[0], "all-gather", "fsdp", of="arrays")
    assert scattered == arrays * more
    assert arrays * more < gathered <= 2 * arrays * more  # again in the backward pass, as needed
    matrices = (4 * 16 * 16 + 3 * 16 * 32) // 2 + 2 * 16  # per device, with heads and MLP sharded over tensor
    sent = total(deep, "reduce-scatter", "fsdp", of="bytes") - total(shallow[0], "reduce-scatter", "fsdp", of="bytes")
    assert sent == 4 * more * matrices


def test_data_all_reduces_gradients_once(shallow, deep, accumulated):
    for found in (shallow[0], deep, accumulated):
        assert total(found, "all-reduce", "data") == 1
    assert all(row.axes for row in deep.collectives)


def test_microbatches_repeat_the_collectives_of_layers(shallow, deep, accumulated):
    per_layer = (total(deep, "all-reduce", "tensor") - total(shallow[0], "all-reduce", "tensor")) / (
        LAYERS[1] - LAYERS[0]
    )
    again = total(accumulated, "all-reduce", "tensor") - total(shallow[0], "all-reduce", "tensor")
    assert again >= per_layer * LAYERS[0]
    assert accumulated.flops == shallow[0].flops and not accumulated.endless


def test_flops_on_a_mesh_equal_those_of_one_device(shallow, deep):
    rows, seq, vocab, embed, mlp = 8, 8, 32, 16, 32
    per_layer = 3 * 2 * rows * seq * (4 * embed**2 + 3 * embed * mlp)
    found = (deep.flops.total - shallow[0].flops.total) / (LAYERS[1] - LAYERS[0])
    assert (
        per_layer < found <= per_layer + 3 * 2 * rows * seq * 2 * seq * embed
    )  # attention scores: at most of all keys
    head = 3 * 2 * rows * seq * embed * vocab
    assert shallow[0].flops.total == LAYERS[0] * found + head


def test_memory_and_traffic(shallow, deep):
    found, args, _ = shallow
    arrays = jax.tree.leaves(eqx.filter(args, eqx.is_array))
    assert found.memory.arguments == sum(x.addressable_shards[0].data.nbytes for x in arrays)
    assert found.memory.aliased == sum(donation.bytes for donation in found.donations)
    assert found.memory.total > found.memory.temporaries > 0
    layer = 4 * ((4 * 16 * 16 + 3 * 16 * 32) // 2 + 2 * 16)  # read at least in both passes, and written once
    assert deep.bytes_moved - found.bytes_moved > 3 * layer * (LAYERS[1] - LAYERS[0])


def test_donated_buffers_are_reused(shallow):
    found, (_, model, opt_state), _ = shallow
    found.require_donations()
    names = [donation.name for donation in found.donations]
    assert len(names) == len(jax.tree.leaves(eqx.filter((model, opt_state), eqx.is_array)))
    assert "model.stack.segments.0.blocks.0.mixer.query.weight" in names
    query = next(donation for donation in found.donations if donation.name.endswith("blocks.0.mixer.query.weight"))
    assert (query.bytes, query.aliased, query.used) == (LAYERS[0] * 16 * 16 * 4 // 4, True, True)
    assert not any(name.startswith("batch") for name in names)


def test_compiled_step_does_not_compile_again_when_called(shallow):
    _, (batch, *donated), step = shallow
    donated = jax.block_until_ready(jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, donated))
    events = []

    def record(event, *_, **__):
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        jax.block_until_ready(step(batch, *donated))
    finally:
        jax.monitoring.unregister_event_duration_listener(record)
    assert not [event for event in events if event.startswith("/jax/core/compile")]


@pytest.mark.parametrize("devices", [1, 8])
def test_failed_donation_raises_by_name(devices):
    mesh = zoo.make_mesh(data=-1, devices=jax.devices()[:devices])
    ones = lambda *shape: zoo.place_batch(jnp.ones(shape), mesh)

    @eqx.filter_jit(donate="all")
    def step(weight, moments, *rest, seen):
        return weight + 1, moments["first"].sum(), rest[0] * 2

    found = compiled(step, ones(8, 4), {"first": ones(8, 2), "unread": ones(16)}, ones(8), seen=ones(8, 3))
    assert {donation.name: (donation.aliased, donation.used) for donation in found.donations} == {
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


def test_collective_axes_on_a_permuted_mesh():
    devices = np.array(jax.devices())[[3, 6, 0, 5, 2, 7, 1, 4]].reshape(2, 2, 2)
    mesh = jax.sharding.Mesh(devices, ("a", "b", "c"))
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, ("a", "c")), mesh=mesh, in_specs=jax.P(("a", "b", "c")), out_specs=jax.P("b")
    )
    for x in (jnp.ones(8), jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, jax.P(("a", "b", "c"))))):
        (found,) = compiled(total, x).collectives
        assert (found.kind, found.axes, found.count, found.bytes) == ("all-reduce", ("a", "c"), 1, 4)


def test_compiled_takes_plain_and_jitted_functions():
    x = jnp.ones((4, 4))
    plain = compiled(lambda x: x @ x, x)
    assert plain.flops.total == 128 and plain.mesh == {} and plain.devices == 1 and not plain.donations
    jitted = compiled(jax.jit(lambda state, scale: (state * scale, 0), donate_argnums=0), x, 2.0)
    assert [(donation.name, donation.aliased) for donation in jitted.donations] == [("state", True)]

    class Odd:
        lower = None

        def __call__(self, x):
            return x + 1

    with pytest.raises(TypeError, match=r"Odd is not one jitted function: pass the result of eqx.filter_jit"):
        compiled(Odd(), x)


def test_report_prints_and_converts_to_json(shallow):
    found = shallow[0]
    assert json.loads(json.dumps(found.as_dict()))["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert found.text.startswith("HloModule") and "text" not in found.as_dict()
    lines = str(found).splitlines()
    assert lines[0].split() == "step data 2 x fsdp 2 x tensor 2: 8 devices".split()
    assert [line.split()[0] for line in lines if line[0] != " "][:7] == [
        *("step", "seconds", "compute", "traffic", "memory", "donated", "collectives")
    ]
    assert any(line.split()[:2] == ["reduce-scatter", "fsdp"] for line in lines)


def test_report_of_a_tpu_has_peak_and_asynchronous_columns(shallow):
    rows = tuple(dataclasses.replace(row, asynchronous=7) for row in shallow[0].collectives)
    lines = str(dataclasses.replace(shallow[0], platform="tpu", collectives=rows)).splitlines()
    assert "B at the peak, per device: " in lines[4] and "peak" not in str(shallow[0])
    header = next(n for n, line in enumerate(lines) if line.startswith("collectives"))
    assert lines[header].endswith("asynchronous") and lines[header + 1].endswith(" 7")
    assert "asynchronous" not in str(shallow[0])
