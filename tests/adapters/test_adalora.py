"""AdaLoRA: its term of the loss is equation 4's, zero where factors are orthogonal, and the same on a mesh."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo import adapters
from zoo.adapters.methods.adalora import find_adalora

KEY = jax.random.key(0)
TOKENS = jax.random.randint(KEY, (8, 4), 0, 32)
BATCH = {"tokens": TOKENS, "targets": jnp.roll(TOKENS, -1, 1)}


def loss_fn(model, batch):
    total, count = zoo.cross_entropy(model, batch)
    return total + 0.5 * count * adapters.orthogonality(model), count


@pytest.fixture(scope="module")
def tuned():
    """Queries of the second layer only, which are split over heads and gathered over embed."""
    model = zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=24, key=KEY)
    wrapped = adapters.adalora(model, targets=("layers.1.attention.query", "out"), rank=3, key=KEY)
    noise = lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape)
    return eqx.combine(jax.tree.map(noise, zoo.trainable(wrapped)), wrapped)


def test_equation_4(tuned):
    mixer, expected = tuned.stack.segments[0].blocks[0].mixer, 0.0
    for adapter, layers in ((mixer.query, [1]), (mixer.out, [0, 1])):
        for layer in layers:
            down = np.asarray(adapter.down.weight[layer], np.float64)
            up = np.asarray(adapter.up.weight[layer], np.float64)
            expected += np.square(down @ down.T - np.eye(3)).sum() + np.square(up.T @ up - np.eye(3)).sum()
    np.testing.assert_allclose(adapters.orthogonality(tuned), expected, rtol=1e-5)
    orthogonal = lambda x: jnp.linalg.qr(x)[0] if x.shape[-1] == 3 else jnp.linalg.qr(x.mT)[0].mT
    flat = jax.tree.map(lambda x: orthogonal(x) if x.ndim == 3 else x, zoo.trainable(tuned))
    assert adapters.orthogonality(eqx.combine(flat, tuned)) < 1e-8
    assert adapters.orthogonality(adapters.ia3(tuned, targets="query", inputs=None)) == adapters.orthogonality(tuned)
    with pytest.raises(ValueError, match="has no AdaLoRA"):
        adapters.orthogonality(adapters.remove(tuned))


def test_on_a_mesh(tuned):
    def mean(parameters):
        total, count = loss_fn(eqx.combine(parameters, tuned), BATCH)
        return total / count

    loss, gradients = eqx.filter_jit(jax.value_and_grad(mean))(zoo.trainable(tuned))
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    theirs, found = zoo.value_and_grad(loss_fn, mesh)(zoo.place(tuned, mesh), zoo.place_batch(BATCH, mesh))
    np.testing.assert_allclose(theirs, loss, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(other, one, atol=5e-5 * float(jnp.abs(one).max()))


def test_ranks_are_kept_where_they_are_worth_most(tuned):
    """9 ranks in two stacks, of which the first layer's queries have none: they take nothing of the budget."""
    gradients = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size + 1), x.shape), zoo.trainable(tuned))
    scores = adapters.rank_importance(tuned, gradients)
    query, other = (tree.stack.segments[0].blocks[0].mixer.query for tree in (tuned, gradients))
    expected = np.abs(query.values[1] * other.values[1]) + np.abs(query.down.weight[1] * other.down.weight[1]).mean(1)
    expected += np.abs(query.up.weight[1] * other.up.weight[1]).mean(0)
    np.testing.assert_allclose(scores[0][1], expected, rtol=1e-5)
    assert (np.asarray(scores[0][0]) == -1).all()

    run = eqx.filter_jit(adapters.keep_top_ranks)
    flat = np.sort(np.concatenate([np.asarray(x).reshape(-1) for x in scores]))[::-1]
    for budget in (0, 4, 9):
        left = run(tuned, scores, jnp.array(budget))
        for score, (_, before), (_, after) in zip(scores, find_adalora(tuned), find_adalora(left), strict=True):
            kept = np.asarray(score) >= (flat[budget - 1] if budget else np.inf)
            np.testing.assert_array_equal(after.values, np.where(kept, before.values, 0))
    with pytest.raises(ValueError, match="2 matrices with an AdaLoRA, and these are no scores"):
        adapters.keep_top_ranks(tuned, scores[:1], 4)


def test_all_forms_are_one_matrix(tuned):
    query = jax.tree.map(lambda x: x[1], tuned.stack.segments[0].blocks[0].mixer.query)
    x = jax.random.normal(KEY, (5, 16))
    np.testing.assert_allclose(query(x), x @ query.dense_weight.T, atol=1e-5)
    np.testing.assert_allclose(query.transposed(x), x @ query.dense_weight, atol=1e-5)
