"""Rematerialization policies: equal gradients, and residuals as counted."""

import equinox as eqx
import jax
import numpy as np
import pytest

import zoo
from zoo.models.stack import swap_stack
from zoo.parallel import SaveNames
from zoo.train.remat import count_residual_bytes

POLICIES = ("none", "elementwise", "dots", SaveNames(("attention", "mlp_hidden")), SaveNames(("attention",)), "full")


def make(key):
    return zoo.models.Transformer(vocab=16, embed=16, layers=2, heads=2, mlp=64, loop="scan", key=key)


def loss_fn(model, batch):
    return zoo.cross_entropy(model, batch)


BATCH = {name: jax.ShapeDtypeStruct((8, 16), "int32") for name in ("tokens", "targets")}


@pytest.mark.ci
@pytest.mark.parametrize("sizes", [{}, pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow)])
def test_policies_agree_in_gradients_and_keep_what_is_counted(sizes):
    mesh = zoo.make_mesh(**sizes, devices=jax.devices()[: 8 if sizes else 1])
    model = zoo.init(make, jax.random.key(0), mesh)
    tokens = jax.random.randint(jax.random.key(1), (8, 17), 0, 16)
    batch = zoo.place_batch({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, mesh)
    counted, gradients, temporaries = [], [], []
    for remat in POLICIES:
        candidate = zoo.configure(model, remat=remat)
        counted.append(count_residual_bytes(candidate, loss_fn, batch, mesh))
        step = eqx.filter_jit(lambda model, batch: zoo.value_and_grad(loss_fn, mesh)(model, batch)[1])
        temporaries.append(zoo.inspect.compiled(step, candidate, batch).memory.temporaries)
        gradients.append([np.asarray(x) for x in jax.tree.leaves(step(candidate, batch))])
    for other in gradients[1:]:
        for x, y in zip(gradients[0], other, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
    assert counted[0] > counted[1] >= counted[2] > counted[3] > counted[4] > counted[5]
    if not sizes:
        hidden = 2 * 8 * 16 * 64 * 4  # layers, tokens, mlp, bytes
        assert counted[3] - counted[4] == hidden
        assert temporaries[3] - temporaries[4] == pytest.approx(hidden, abs=64)  # aligned
        assert temporaries[0] > temporaries[1] > temporaries[3] > temporaries[5]


def test_an_unrolled_stack_refuses_a_policy():
    with pytest.raises(ValueError, match="UnrolledStack does not rematerialize"):
        unrolled = swap_stack(make(jax.random.key(0)), zoo.models.Stack.unstack)
        zoo.configure(unrolled, remat="full")
