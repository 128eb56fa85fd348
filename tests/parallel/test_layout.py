"""The layout's table takes new dims, and refuses axes and rows that would shard wrongly."""

import pytest
from jax.sharding import PartitionSpec as P

import zoo
from zoo import Layout
from zoo.parallel import ZERO1, ZERO2, ZERO3, Dim


def test_layout_takes_new_dims_and_raises_on_bad_tables():
    mesh = zoo.make_mesh(data=4, tensor=2, layout=Layout().with_dims(sensors=("tensor",)))
    assert mesh.spec([Dim("sensors"), Dim("embed")], (6, 3)) == P(("tensor",))
    with pytest.raises(ValueError, match="'model', but the mesh axes are"):
        Layout().with_dims(sensors=("model",))
    with pytest.raises(ValueError, match="shards 'sensors' at rest"):
        Layout(parameters={"sensors": ("fsdp",)})
    with pytest.raises(ValueError, match="let `optimizer` contain `parameters`"):
        Layout(optimizer={})
    with pytest.raises(ValueError, match="let `gradients` contain `parameters`"):
        Layout(gradients={})
    with pytest.raises(ValueError, match="`gradients` shards 'mlp' over 'tensor', which shards no tokens"):
        Layout(parameters={}, gradients={"mlp": ("tensor",)})
    with pytest.raises(ValueError, match=r"`slots` of KV caches .* over \('context',\) or not at all, not over"):
        Layout().with_dims(slots=("tensor",))
    assert hash(Layout()) == hash(Layout())
    assert Layout() == ZERO3 != ZERO1 != ZERO2 != ZERO3
