"""AdaLoRA: the orthogonality penalty, and the agreement of all its products."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.adapters.perturb import perturb
from zoo import Layout, adapters
from zoo.adapters.methods.rank_allocation import keep_top_ranks, rank_importance
from zoo.parallel.rounds import merge_rounds, select_round

KEY = jax.random.key(0)
TOKENS = jax.random.randint(KEY, (8, 4), 0, 32)
BATCH = {"tokens": TOKENS, "targets": jnp.roll(TOKENS, -1, 1)}


def loss_fn(model, batch):
    total, count = zoo.cross_entropy(model, batch)
    return total + 0.5 * count * adapters.orthogonality(model), count


@pytest.fixture(scope="module")
def model():
    """AdaLoRAs of the output projections of both layers, and of the second layer's query."""

    @eqx.filter_jit
    def make():
        model = zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=24, key=KEY)
        return perturb(adapters.adalora(model, targets=("layers.1.attention.query", "out"), rank=3, key=KEY), scale=0.3)

    return make()


def test_orthogonality_is_equation_4_of_the_paper(model):
    mixer, expected = model.stack.segments[0].blocks[0].mixer, 0.0
    for adapter, layers in ((mixer.query, [1]), (mixer.out, [0, 1])):
        for layer in layers:
            down = np.asarray(adapter.down.weight[layer], np.float64)
            up = np.asarray(adapter.up.weight[layer], np.float64)
            expected += np.square(down @ down.T - np.eye(3)).sum() + np.square(up.T @ up - np.eye(3)).sum()
    np.testing.assert_allclose(adapters.orthogonality(model), expected, rtol=1e-5)
    orthogonal = lambda x: jnp.linalg.qr(x)[0] if x.shape[-1] == 3 else jnp.linalg.qr(x.mT)[0].mT
    flat = jax.tree.map(lambda x: orthogonal(x) if x.ndim == 3 else x, zoo.trainable(model))
    assert adapters.orthogonality(eqx.combine(flat, model)) < 1e-8
    assert adapters.orthogonality(adapters.ia3(model, targets="query", inputs=None)) == adapters.orthogonality(model)
    with pytest.raises(ValueError, match="has no AdaLoRA"):
        adapters.orthogonality(adapters.remove(model))


@pytest.mark.slow
def test_orthogonality_and_ranks_of_layers_in_rounds():
    """Equal to one round, in any order of the layers; not while a pipeline runs one round."""
    model = zoo.models.Transformer(vocab=32, embed=16, layers=4, heads=2, mlp=24, key=KEY)
    model = perturb(adapters.adalora(model, targets="out", rank=3, key=KEY), scale=0.3)
    mesh = zoo.make_mesh(data=1, pipe=2, tensor=2, devices=jax.devices()[:4], layout=Layout(rounds=2))
    placed, run = zoo.place(model, mesh), zoo.spmd(adapters.orthogonality, mesh, out="")
    np.testing.assert_allclose(run(placed), adapters.orthogonality(model), rtol=1e-5)
    with pytest.raises(NotImplementedError, match=r"all 2 rounds at once.* rounds=1, or Schedule\(\"gpipe\"\)"):
        zoo.spmd(lambda model: adapters.orthogonality(select_round(model, 0)), mesh, out="")(placed)

    scores = rank_importance(model, model)
    kept = keep_top_ranks(placed, rank_importance(placed, placed), 5)
    assert eqx.tree_equal(jax.device_get(merge_rounds(kept)), jax.device_get(keep_top_ranks(model, scores, 5)))


@pytest.mark.slow
def test_orthogonality_on_a_mesh_matches_one_device(model):
    def mean(parameters):
        total, count = loss_fn(eqx.combine(parameters, model), BATCH)
        return total / count

    loss, gradients = eqx.filter_jit(jax.value_and_grad(mean))(zoo.trainable(model))
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    loss_on_mesh, gradients_on_mesh = zoo.value_and_grad(loss_fn, mesh)(
        zoo.place(model, mesh), zoo.place_batch(BATCH, mesh)
    )
    np.testing.assert_allclose(loss_on_mesh, loss, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(gradients), jax.tree.leaves(gradients_on_mesh), strict=True):
        np.testing.assert_allclose(y, x, atol=5e-5 * float(jnp.abs(x).max()))


def test_adalora_products_match_dense_weight(model):
    query = jax.tree.map(lambda x: x[1], model.stack.segments[0].blocks[0].mixer.query)
    x = jax.random.normal(KEY, (5, 16))
    np.testing.assert_allclose(query(x), x @ query.dense_weight.T, atol=1e-5)
    np.testing.assert_allclose(query.transposed(x), x @ query.dense_weight, atol=1e-5)
