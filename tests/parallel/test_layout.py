"""One table gives every spec; what does not fit raises, and says what would."""

import logging

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import zoo
from zoo.layers import Linear, RMSNorm
from zoo.parallel import ZERO1, Dim, Layout

KEY = jax.random.key(0)


def spec(mesh, dims, shape):
    return mesh.spec([Dim(*d) if isinstance(d, tuple) else Dim(d) for d in dims], shape)


def test_dims_in_use_and_at_rest():
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    assert spec(mesh, (("heads", 4), "embed"), (16, 32)) == P(("tensor",), ("fsdp",))
    assert spec(mesh, ("embed", "mlp"), (32, 64)) == P(("fsdp",), ("tensor",))
    assert spec(mesh, ("batch", "seq"), (8, 5)) == P(("data", "fsdp"))
    assert spec(mesh, ("layers", "embed", "embed"), (3, 4, 4)) == P(None, ("fsdp",))
    assert spec(zoo.make_mesh(data=8), (("heads", 4), "embed"), (16, 32)) == P()


def test_few_kv_heads_lie_whole_and_so_does_an_odd_vocabulary():
    mesh = zoo.make_mesh(data=2, tensor=4)
    assert spec(mesh, (("kv_heads", 4), "embed"), (32, 32)) == P(("tensor",))
    assert spec(mesh, (("kv_heads", 4), "embed"), (8, 32)) == P()
    assert spec(mesh, ("vocab", "embed"), (97, 32)) == P()


@pytest.mark.parametrize(
    "dims, shape, message",
    [
        ((("heads", 4), "embed"), (24, 32), "6 heads do not share out over tensor=4.*multiple of 4.*1, 2, 3 or 6"),
        ((("kv_heads", 4), "embed"), (12, 32), "3 kv_heads do not share out.*or a multiple of 3"),
        (("mlp", "embed"), (64, 33), "33 embed do not share out over fsdp=2"),
        (("batch", "seq"), (3, 4), "3 rows do not share out over fsdp=2"),
        (("depth", "embed"), (4, 4), r"the layout has no dim 'depth'.*with_dims\(depth=\(\)\)"),
    ],
)
def test_what_does_not_divide_or_is_not_known_raises(dims, shape, message):
    with pytest.raises(ValueError, match=message):
        spec(zoo.make_mesh(fsdp=2, data=1, tensor=4), dims, shape)


def test_a_layout_takes_dims_of_ones_own_and_refuses_what_makes_no_sense():
    mesh = zoo.make_mesh(data=4, tensor=2, layout=Layout().with_dims(sensors=("tensor",)))
    assert spec(mesh, ("sensors", "embed"), (6, 3)) == P(("tensor",))
    with pytest.raises(ValueError, match="'model', but the mesh axes are"):
        Layout().with_dims(sensors=("model",))
    with pytest.raises(ValueError, match="shards 'sensors' at rest"):
        Layout(parameters={"sensors": ("fsdp",)})
    with pytest.raises(ValueError, match="let `optimizer` contain `parameters`"):
        Layout(optimizer={})
    assert hash(Layout()) == hash(Layout())
    assert Layout() == Layout() != ZERO1


@pytest.mark.parametrize(
    "sizes, error, message",
    [
        ({"data": 3}, ValueError, "data=3 asks for 3 devices, there are 8"),
        ({"data": -1, "tensor": 3}, ValueError, "tensor=3 asks for a multiple of 3 devices, there are 8"),
        ({"data": -1, "fsdp": -1}, ValueError, "only one axis can be -1, not data and fsdp"),
        ({"data": 0}, ValueError, "size of at least 1"),
        ({"context": 2}, NotImplementedError, "context=2"),
        ({"expert": 2}, NotImplementedError, "expert=2"),
        ({"pipe": 2}, NotImplementedError, "pipe=2"),
    ],
)
def test_a_mesh_that_does_not_fit_raises(sizes, error, message):
    with pytest.raises(error, match=message):
        zoo.make_mesh(**sizes)


def test_all_axes_exist_and_devices_may_be_named():
    mesh = zoo.make_mesh(tensor=2, devices=jax.devices()[:4])
    assert mesh.shape == {"pipe": 1, "data": 2, "fsdp": 1, "expert": 1, "context": 1, "tensor": 2}
    assert str(mesh) == "data 2 x tensor 2"
    assert str(zoo.make_mesh(devices=jax.devices()[:1])) == "one device"


def test_place_and_init_agree_and_no_device_holds_more_than_its_share(caplog):
    def make(key):
        return {"linear": Linear(32, 64, in_=Dim("embed"), out=Dim("mlp"), key=key), "norm": RMSNorm(32)}

    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    born, placed = zoo.init(make, KEY, mesh), zoo.place(make(KEY), mesh)
    for a, b in zip(jax.tree.leaves(born), jax.tree.leaves(placed), strict=True):
        assert a.sharding == b.sharding
        assert jnp.array_equal(a, b)
    shares = [shard.data.shape for shard in born["linear"].weight.addressable_shards]
    assert shares == [(32, 16)] * 8
    with pytest.raises(ValueError, match=r"linear.weight: 63 mlp do not share out over tensor=2"):
        zoo.init(lambda key: {"linear": Linear(32, 63, in_=Dim("embed"), out=Dim("mlp"), key=key)}, KEY, mesh)


def test_a_vocabulary_that_lies_whole_is_told_once(caplog):
    mesh = zoo.make_mesh(data=2, tensor=4)
    with caplog.at_level(logging.WARNING, "zoo"):
        zoo.place(zoo.layers.Embedding(97, 32, key=KEY), mesh)
    assert [r.message for r in caplog.records] == [
        "weight: 97 vocab do not share out over tensor=4 and are replicated; 100 would be sharded."
    ]


def test_zero1_keeps_parameters_whole_and_splits_updates():
    mesh = zoo.make_mesh(fsdp=8, layout=ZERO1)
    norm = RMSNorm(32)
    assert zoo.place(norm, mesh).weight.sharding.spec == P()
    assert zoo.place(norm, mesh.optimizer).weight.sharding.spec == P(("fsdp",))
    constrained = eqx.filter_jit(lambda x: zoo.place(x, mesh.optimizer))(norm)
    assert constrained.weight.sharding.spec == P(("fsdp",))


def test_place_batch_deals_rows():
    mesh = zoo.make_mesh(data=2, fsdp=4)
    batch = zoo.place_batch({"tokens": jnp.zeros((16, 5), int), "scale": jnp.ones(())}, mesh)
    assert batch["tokens"].sharding.shard_shape((16, 5)) == (2, 5)
    with pytest.raises(ValueError, match="tokens: 6 rows do not share out over data=2 x fsdp=4"):
        zoo.place_batch({"tokens": jnp.zeros((6, 5), int)}, mesh)
