"""Delayed scaling: what a step observes, how histories take it up, and that meshes agree."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.precision.fp8_problem import MESH, largest_difference, make_model, run
from zoo import precision
from zoo.layers.quantized.fp8 import AmaxHistory
from zoo.ops.quantized.per_tensor import DelayedScaling
from zoo.ops.quantized.scaled_matmul import AmaxArrays, scaled_matmul


def test_cotangent_of_a_history_is_the_amax_of_the_call():
    history = AmaxArrays(*(jnp.array([1.0, 2.0, 0.5]) * scale for scale in (2, 3, 4)))
    x, weight, gradient = jnp.ones((1, 4, 8)) * 7, jnp.ones((16, 8)) * 3, jnp.ones((1, 4, 16)) * 3
    apply = lambda history: scaled_matmul(x, weight, 1, DelayedScaling(history=3), history=history)
    y, pull_back = jax.vjp(jax.jit(apply), history)
    (seen,) = pull_back(gradient)
    assert [z.tolist() for z in seen] == [[7, 0, 0], [3, 0, 0], [3, 0, 0]]
    np.testing.assert_allclose(y, 8 * 4 * 3, rtol=1e-6)  # 7 saturates at the largest maximum before, 4
    recipe = DelayedScaling(history=3, margin=1)
    wide = jax.jit(lambda history: scaled_matmul(x, weight, 1, recipe, history=history))(history)
    np.testing.assert_allclose(wide, 8 * 7 * 3, rtol=0.13)


def test_update_prepends_maxima_and_repeats_the_last_for_none():
    model = precision.fp8(make_model(), DelayedScaling(history=3))
    is_history = lambda node: isinstance(node, AmaxHistory)

    def fill(tree, row):
        spread = lambda node: jax.tree.map(lambda x: jnp.asarray(np.broadcast_to(np.float32(row), x.shape)), node)
        return jax.tree.map(lambda node: spread(node) if is_history(node) else node, tree, is_leaf=is_history)

    for latest, expected in ((5.0, [5, 1, 2]), (0.0, [1, 1, 2]), (np.inf, [1, 1, 2]), (np.nan, [1, 1, 2])):
        updated = precision.update_amax(fill(model, [1.0, 2.0, 9.0]), fill(model, [latest, 0.0, 0.0]))
        histories = filter(is_history, jax.tree.leaves(updated, is_leaf=is_history))
        assert all((np.asarray(x) == expected).all() for history in histories for x in jax.tree.leaves(history))
    assert eqx.tree_equal(precision.remove_fp8(updated), make_model())
    with pytest.raises(ValueError, match="no histories of maxima"):
        precision.update_amax(precision.fp8(make_model()), None)


@pytest.mark.slow
def test_delayed_scaling_on_a_mesh_equals_one_device():
    """Two steps: the first with the scale 1, the second with those of what the first has seen."""
    results = []
    for sizes in ({}, MESH):
        model = precision.fp8(make_model(), DelayedScaling(history=4))
        *_, seen = run(model, observe=True, **sizes)
        results.append(
            (seen, run(precision.update_amax(model, jax.tree.map(jnp.asarray, seen)), observe=True, **sizes))
        )
    (first, (loss, gradients, _)), (mesh_first, (mesh_loss, mesh_gradients, _)) = results
    assert all((x[..., 0] > 0).all() and not x[..., 1:].any() for x in jax.tree.leaves(first))
    assert largest_difference(mesh_first, first) < 1e-5
    np.testing.assert_allclose(mesh_loss, loss, rtol=1e-6)
    assert largest_difference(mesh_gradients, gradients) < 1e-5


def test_delayed_scaling_refuses_experts_and_heads():
    model = make_model("MixtureOfExperts", experts=4, top=2, tied=False)
    with pytest.raises(ValueError, match=r"experts\.\*\.down: DelayedScaling quantizes no experts"):
        precision.fp8(model, DelayedScaling())
    with pytest.raises(ValueError, match="head: a loss calls the head in parts"):
        precision.fp8(model, DelayedScaling(), targets="head")
