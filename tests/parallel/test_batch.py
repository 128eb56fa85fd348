"""`place_batch` shards rows and tokens by the dims of a batch; processes that hold the same rows read the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import zoo
from tests.parallel.any_mesh import make_any_mesh
from zoo.parallel import Module
from zoo.parallel.batch import _find_row_shards, _group_processes, _make_global_batch


class Pairs(Module):
    """A batch that says its dims."""

    logits: Float[Array, "batch seq choices"]
    rewards: Float[Array, "choices batch"]
    scale: Float[Array, "choices"]


def test_place_batch_shards_rows():
    mesh = zoo.make_mesh(data=2, fsdp=4)
    batch = zoo.place_batch({"tokens": jnp.zeros((16, 5), int), "scale": jnp.ones(())}, mesh)
    assert batch["tokens"].sharding.shard_shape((16, 5)) == (2, 5)
    with pytest.raises(ValueError, match="tokens: 6 rows do not divide evenly over data=2 x fsdp=4"):
        zoo.place_batch({"tokens": jnp.zeros((6, 5), int)}, mesh)


def test_place_batch_shards_sequences_of_tokens_alone():
    mesh = make_any_mesh(data=2, context=4)
    tokens, image = jnp.zeros((4, 8), int), jnp.zeros((4, 8, 8))
    pairs = Pairs(jnp.zeros((4, 8, 3)), jnp.zeros((3, 4)), jnp.zeros(3))
    batch = {"chosen": {"tokens": tokens, "weights": image}, "images": (image, jnp.zeros(4)), "pairs": pairs}
    for shapes in (batch, jax.eval_shape(lambda: batch)):
        placed = zoo.place_batch({**shapes}, mesh)
        shards = jax.tree.map(lambda x: x.sharding.shard_shape(x.shape), placed)
        assert shards["chosen"] == {"tokens": (2, 2), "weights": (2, 2, 8)}
        assert shards["images"] == ((2, 8, 8), (2,))
        assert jax.tree.leaves(placed["pairs"])[1].sharding.spec == jax.P(None, ("data",))
        assert [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(placed["pairs"])] == [(2, 2, 3), (3, 2), (3,)]
    assert zoo.place_batch((tokens, image), mesh)[0].sharding.spec == jax.P(("data",), ("context",))
    run = zoo.spmd(lambda batch: (batch["tokens"][:, :2], batch["images"][:, :8]), mesh, out="batch seq")
    whole = jnp.arange(256.0).reshape(4, 8, 8)
    tokens, images = run({"tokens": whole[:, :, 0], "images": whole})
    assert jnp.array_equal(tokens, whole[:, :, 0]) and jnp.array_equal(images, whole)


def test_place_batch_checks_ids_against_the_vocabulary():
    mesh = zoo.make_mesh(data=8)
    tokens = jnp.zeros((8, 3), int).at[5, 2].set(15)
    batch = {"tokens": tokens, "targets": tokens.at[0, 0].set(-100), "weights": jnp.full((8, 3), 99.0)}
    placed = zoo.place_batch(batch, mesh, vocab=16)
    assert all(jnp.array_equal(placed[name], batch[name]) for name in batch)
    for name, message in (
        ("tokens", r"tokens: 15 is outside the vocabulary of 15 tokens$"),
        ("targets", r"targets: 15 is outside the vocabulary of 15 tokens; a negative target is ignored"),
    ):
        with pytest.raises(ValueError, match=message):
            zoo.place_batch({name: batch[name]}, mesh, vocab=15)
    with pytest.raises(ValueError, match="tokens: -100 is outside"):
        zoo.place_batch({"tokens": batch["targets"]}, mesh, vocab=16)
    with pytest.raises(TypeError, match="a batch is a mapping with tokens and targets"):
        zoo.place_batch(tokens, mesh, vocab=16)


def assign(mesh, processes):
    """Assign rows to processes that have these devices, in order."""
    owner = dict(zip(mesh.devices.devices.flat, processes, strict=True))
    shards = _find_row_shards(mesh, owner.__getitem__)
    return shards, _group_processes(shards, mesh)


@pytest.mark.parametrize(
    "sizes, processes, readers",
    [
        ({"data": 8}, [0] * 4 + [1] * 4, [(0, 2), (1, 2)]),
        ({"data": 2, "fsdp": 2, "tensor": 2}, [0, 0, 1, 1, 2, 2, 3, 3], [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ({"pipe": 2, "data": 2, "tensor": 2}, [0] * 4 + [1] * 4, [(0, 1), (0, 1)]),
        ({"pipe": 2, "data": 4}, [0, 0, 1, 1, 2, 2, 3, 3], [(0, 2), (1, 2), (0, 2), (1, 2)]),
        ({"data": 2, "context": 4}, [0, 0, 1, 1, 2, 2, 3, 3], [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ({"tensor": 8}, [0] * 4 + [1] * 4, [(0, 1), (0, 1)]),
        ({"data": 4, "tensor": 2}, [1] * 4 + [0] * 4, [(1, 2), (0, 2)]),
    ],
)
def test_processes_that_hold_the_same_rows_read_the_same(sizes, processes, readers):
    """Every process brings its rows over the full sequence; its devices find those of the global array in them."""
    mesh = make_any_mesh(**sizes)
    shards, found = assign(mesh, processes)
    assert [found[process] for process in range(len(readers))] == readers
    tokens = np.arange(8 * 4).reshape(8, 4)
    sharding = mesh.shardings({"tokens": tokens}, lambda name: ("batch", "seq"))["tokens"]
    for device, index in sharding.devices_indices_map(tokens.shape).items():
        process = processes[list(mesh.devices.devices.flat).index(device)]
        part, count = found[process]
        read = tokens.reshape(count, -1, 4)[part]
        assert np.isin(tokens[index], read).all()
        assert len(shards[process]) * count == mesh.shape["data"] * mesh.shape["fsdp"]


def test_processes_with_parts_of_the_same_rows_are_refused():
    message = r"hold: process 0 \[0\], process 1 \[0, 1\], process 2 \[1\]. Let the axes inside a process multiply"
    with pytest.raises(ValueError, match=message):
        assign(make_any_mesh(data=2, tensor=3), [0, 0, 1, 1, 2, 2])
    assert zoo.parallel.reader(zoo.make_mesh(data=2, tensor=4)) == (0, 1)


def test_global_arrays_of_the_rows_of_a_process():
    """One process that holds all shards makes the arrays that `device_put` makes, whatever their dims."""
    mesh = make_any_mesh(data=2, context=2)
    values = np.arange(32, dtype=np.float32)
    pairs = Pairs(jnp.array(values.reshape(4, 4, 2)), jnp.array(values[:8].reshape(2, 4)), jnp.array(values[:2]))
    batch = {"tokens": values.reshape(4, 8), "pairs": pairs, "scale": np.float32(3)}
    placed, expected = _make_global_batch(batch, mesh, [0, 1], 1), zoo.place_batch(batch, mesh)
    for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(expected), strict=True):
        assert a.sharding == b.sharding and jnp.array_equal(a, b)


@pytest.mark.parametrize("place", [zoo.place_batch, zoo.place])
def test_placed_arrays_do_not_share_the_buffers_of_a_loader(place):
    """JAX shares the memory of arrays that are aligned to 64 bytes: chance decides for others."""
    memory = np.zeros(8 * 16 * 4 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    buffer = memory[start : start + 8 * 16 * 4].view(np.int32).reshape(8, 16)
    for mesh in (zoo.make_mesh(devices=jax.devices()[:1]), zoo.make_mesh()):
        buffer[:] = 3
        placed = place({"tokens": buffer}, mesh)
        buffer[:] = 9
        assert np.unique(placed["tokens"]).tolist() == [3]
