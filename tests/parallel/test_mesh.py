"""PartitionSpecs follow from one table; sizes that a mesh does not divide raise, with sizes that would work."""

from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import pytest
from jax.sharding import PartitionSpec as P

import zoo
from tests.parallel.any_mesh import make_any_mesh
from zoo import Layout
from zoo.layers import RMSNorm
from zoo.parallel import ZERO1, ZERO2, Dim
from zoo.parallel.mesh import replicated_dims

KEY = jax.random.key(0)


def spec(mesh, dims, shape):
    return mesh.spec([Dim(*d) if isinstance(d, tuple) else Dim(d) for d in dims], shape)


def test_spec_of_dims_in_compute_and_at_rest():
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    assert spec(mesh, (("heads", 4), "embed"), (16, 32)) == P(("tensor",), ("fsdp",))
    assert spec(mesh, ("embed", "mlp"), (32, 64)) == P(("fsdp",), ("tensor",))
    assert spec(mesh, ("batch", "seq"), (8, 5)) == P(("data", "fsdp"))
    assert spec(mesh, ("layers", "embed", "embed"), (3, 4, 4)) == P(None, ("fsdp",))
    assert spec(zoo.make_mesh(data=8), (("heads", 4), "embed"), (16, 32)) == P()


def test_count_shards_of_a_dim_in_compute():
    mesh = make_any_mesh(data=2, fsdp=2, tensor=2)
    assert [mesh.count_shards(dim) for dim in ("batch", "seq", "mlp", "embed")] == [4, 1, 2, 1]
    assert make_any_mesh(data=2, context=4).count_shards("seq") == 4


def test_spec_replicates_few_kv_heads_and_an_odd_vocabulary():
    mesh = zoo.make_mesh(data=2, tensor=4)
    assert spec(mesh, (("kv_heads", 4), "embed"), (32, 32)) == P(("tensor",))
    assert spec(mesh, (("kv_heads", 4), "embed"), (8, 32)) == P()
    assert spec(mesh, ("vocab", "embed"), (97, 32)) == P()


def test_spec_drops_outer_axes_that_do_not_divide_a_vocabulary():
    mesh = make_any_mesh(data=2, pipe=2, tensor=2)
    specs = [spec(mesh, ("vocab", "embed"), (size, 32)) for size in (100, 98, 97)]
    assert specs == [P(("pipe", "tensor")), P(("tensor",)), P()]
    shapes = eqx.filter_eval_shape(lambda: [zoo.layers.Embedding(size, 32, key=KEY) for size in (98, 100)])
    assert replicated_dims(shapes, mesh) == [
        "0.weight: 98 vocab do not divide evenly over pipe x tensor=4 and are sharded only over tensor; "
        "100 would be sharded over all."
    ]
    assert replicated_dims(shapes, make_any_mesh(tensor=2)) == []


def test_spec_keeps_the_axes_at_rest_that_gather_reads():
    """An uneven vocabulary is replicated in use, and raises where it is sharded at rest too."""
    mesh = make_any_mesh(Layout(parameters={"vocab": ("fsdp",)}), fsdp=2, tensor=4)
    assert spec(mesh, ("vocab", "embed"), (98, 32)) == P(("fsdp",))
    assert spec(mesh, ("vocab", "embed"), (96, 32)) == P(("tensor", "fsdp"))
    with pytest.raises(ValueError, match="97 vocab do not divide evenly over fsdp=2. Use a multiple of 2 vocab"):
        spec(mesh, ("vocab", "embed"), (97, 32))


@pytest.mark.parametrize(
    "dims, shape, message",
    [
        ((("heads", 4), "embed"), (24, 32), "6 heads do not divide evenly over tensor=4.*multiple of 4.*1, 2, 3 or 6"),
        ((("kv_heads", 4), "embed"), (12, 32), "3 kv_heads do not divide evenly.*or a multiple of 3"),
        (("mlp", "embed"), (64, 33), "33 embed do not divide evenly over fsdp=2"),
        (("batch", "seq"), (3, 4), "3 rows do not divide evenly over fsdp=2"),
        (("depth", "embed"), (4, 4), r"the layout has no dim 'depth'.*with_dims\(depth=\(\)\)"),
    ],
)
def test_spec_raises_on_unknown_dims_and_indivisible_sizes(dims, shape, message):
    with pytest.raises(ValueError, match=message):
        spec(zoo.make_mesh(fsdp=2, data=1, tensor=4), dims, shape)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"data": 3}, r"data=3 asks for 3 devices, there are 8. .* make_mesh\(devices=jax.devices\(\)\[:3\]\)"),
        ({"data": -1, "tensor": 3}, "tensor=3 asks for a multiple of 3 devices, there are 8"),
        ({"fsdp": 16}, "there are 8. .* on a CPU, .*XLA_FLAGS=--xla_force_host_platform_device_count=16$"),
        ({"fsdp": 2, "devices": jax.devices()[:1]}, "a multiple of 2 devices, there is 1. Let the sizes multiply to 1"),
        ({"data": -1, "fsdp": -1}, "only one axis can be -1, not data and fsdp"),
        ({"data": 0}, "size of at least 1"),
    ],
)
def test_mesh_of_bad_sizes_raises(sizes, message):
    with pytest.raises(ValueError, match=message):
        zoo.make_mesh(**sizes)


@pytest.mark.parametrize(
    ("name", "advice"),
    [("tp", "tensor= is"), ("dp", "data= is"), ("sp", "context= is"), ("axes", "it takes data, fsdp, expert")],
)
def test_mesh_explains_an_axis_of_another_name(name, advice):
    with pytest.raises(TypeError, match=f"make_mesh has no argument '{name}': {advice}"):
        zoo.make_mesh(**{name: 2})


def test_mesh_has_all_axes_and_takes_devices():
    mesh = zoo.make_mesh(tensor=2, devices=jax.devices()[:4])
    assert mesh.shape == {"pipe": 1, "data": 2, "fsdp": 1, "expert": 1, "context": 1, "tensor": 2}
    assert str(mesh) == "data 2 x tensor 2"
    assert str(zoo.make_mesh(devices=jax.devices()[:1])) == "one device"


@pytest.mark.parametrize("layout", [ZERO1, ZERO2])
def test_zero1_and_zero2_replicate_parameters(layout):
    mesh = zoo.make_mesh(fsdp=8, layout=layout)
    norm = RMSNorm(32)
    assert zoo.place(norm, mesh).weight.sharding.spec == P()
    assert zoo.place(norm, mesh.optimizer).weight.sharding.spec == P(("fsdp",))
    constrained = eqx.filter_jit(lambda x: zoo.place(x, mesh.optimizer))(norm)
    assert constrained.weight.sharding.spec == P(("fsdp",))


@pytest.mark.parametrize("axis", ["fsdp", "expert", "context", "tensor"])
def test_only_pipe_and_data_span_slices_of_tpus(axis):
    devices = [SimpleNamespace(slice_index=index % 2, platform="tpu") for index in range(8)]
    sizes: dict[str, Any] = {"data": 1, axis: 8}
    with pytest.raises(ValueError, match=rf"8 devices in 2 slices, which a slow network joins, and {axis}=8: let pipe"):
        zoo.make_mesh(**sizes, devices=devices)


def test_mesh_prints_its_axes_and_devices():
    assert repr(zoo.make_mesh(2, 2, tensor=2)) == "Mesh(data=2, fsdp=2, tensor=2; 8 devices)"
    assert repr(zoo.make_mesh(1, devices=jax.devices()[:1])) == "Mesh(1 device)"
