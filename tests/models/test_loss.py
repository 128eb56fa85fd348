"""The chunked cross-entropy, and that of a sharded vocabulary, equal the reference: values and gradients."""

import itertools
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.jaxprs import equations
from tests.parallel.any_mesh import make_any_mesh
from tests.quick import mark_slow
from zoo.models.loss import chunked_cross_entropy, token_losses
from zoo.models.loss_request import choose_chunk
from zoo.ops.cross_entropy import cross_entropy
from zoo.ops.platform import target_platform
from zoo.parallel import Dim

KEY = jax.random.key(0)


def mark_chunks():
    """Yield all options of a chunked loss; those that are not slow have each value once, with and without a rest."""
    for chunk, z_loss, bias in itertools.product([1, 4, 7, 64], [0.0, 1e-2], [False, True]):
        quick = (chunk, z_loss, bias) in ((4, 1e-2, True), (64, 0.0, False))
        yield pytest.param(chunk, z_loss, bias, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("chunk, z_loss, bias", list(mark_chunks()))
def test_chunked_cross_entropy_equals_reference(chunk, z_loss, bias):
    rng = np.random.default_rng(0)
    head = zoo.layers.Linear(8, 11, bias=bias, key=KEY)
    if bias:
        head = eqx.tree_at(lambda head: head.bias, head, jnp.asarray(rng.normal(size=11), "float32"))
    x, targets = jnp.asarray(rng.normal(size=(13, 8)) * 3, "float32"), jnp.asarray(rng.integers(0, 11, 13))
    weights = jnp.asarray(rng.uniform(size=13) * (np.arange(13) % 3 > 0), "float32")

    def reference(args):
        head, x, weights = args
        return (cross_entropy(head(x), targets, z_loss=z_loss) * weights).sum()

    def in_chunks(args):
        head, x, weights = args
        return 0.5 * chunked_cross_entropy(head, x, targets, weights, z_loss, chunk)

    @eqx.filter_jit
    def run(args):
        return *(eqx.filter_value_and_grad(function)(args) for function in (reference, in_chunks)), in_chunks(args)

    (expected, expected_grads), (loss, grads), alone = jax.device_get(run((head, x, weights)))
    assert np.allclose(2 * loss, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert np.allclose(2 * a, b, rtol=1e-4, atol=1e-5)
    assert np.allclose(2 * alone, expected, rtol=1e-5), "without a gradient"


def test_chunked_cross_entropy_never_holds_all_logits():
    head = zoo.layers.Linear(16, 512, key=KEY)
    x, targets, weights = jnp.ones((256, 16)), jnp.zeros(256, int), jnp.ones(256)

    def loss(head, x):
        return chunked_cross_entropy(head, x, targets, weights, 0.0, 32)

    step = eqx.filter_jit(eqx.filter_grad(loss)).lower(head, x).compile()
    assert step.compiled.memory_analysis().temp_size_in_bytes < 256 * 512 * 4 / 2


def test_the_gradient_of_logits_is_elementwise():
    gradient = jax.grad(lambda logits, targets: token_losses(logits, targets).sum())
    found = {
        equation.primitive.name for equation in equations(jax.make_jaxpr(gradient)(jnp.ones((4, 8)), jnp.ones(4, int)))
    }
    assert "exp" in found and not {name for name in found if "scatter" in name or "gather" in name}


@pytest.mark.parametrize(
    "platform, vocab, expected",
    [("cpu", 32_768, 1024), ("gpu", 32_768, 4096), ("tpu", 131_072, 2048), ("gpu", 2**20, 1024)],
)
def test_more_tokens_at_a_time_where_memory_is_fast(platform, vocab, expected):
    with target_platform(platform):
        assert choose_chunk(vocab) == expected


@pytest.mark.one_case
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_cross_entropy_of_a_sharded_vocabulary(z_loss):
    mesh = zoo.make_mesh(data=2, tensor=4)
    logits = jax.random.normal(KEY, (4, 6, 16)) * 5
    head = zoo.place(zoo.layers.Linear(16, 16, in_=Dim("embed"), out=Dim("vocab"), key=KEY), mesh)
    targets = jax.random.randint(KEY, (4, 6), 0, 16)
    sharded = zoo.spmd(lambda h, x, t: token_losses(h(x), t, z_loss=z_loss), mesh, out="batch seq")(
        head, logits, targets
    )
    assert jnp.allclose(sharded, cross_entropy(head(logits), targets, z_loss=z_loss), rtol=1e-5, atol=1e-5)


@pytest.mark.ci
def test_cross_entropy_weights_default_to_one():
    model = zoo.models.Transformer(vocab=16, embed=8, layers=1, heads=2, mlp=8, key=KEY)
    tokens = jax.random.randint(KEY, (2, 5), 0, 16)
    batch = {"tokens": tokens, "targets": tokens}
    total, count = zoo.cross_entropy(model, batch)
    assert count == 10
    assert jnp.allclose(total, cross_entropy(model(tokens), tokens).sum(), rtol=1e-5)
    none = zoo.cross_entropy(model, batch | {"weights": jnp.zeros((2, 5))})
    assert none == (0, 0)
    negative = np.ones((2, 5), np.float32)
    negative[0, 1] = -9  # the weights cancel
    with pytest.raises(ValueError, match="weights: expected numbers of at least 0"):
        zoo.cross_entropy(model, batch | {"weights": negative})
    assert all(map(jnp.isnan, zoo.cross_entropy(model, batch | {"weights": jnp.asarray(negative)})))
    ignored = {"targets": tokens.at[0, 1].set(-1), "weights": jnp.asarray(negative)}
    assert zoo.cross_entropy(model, batch | ignored)[1] == 9, "a target that is ignored has the weight 0"


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"data": 2, "tensor": 4}])
def test_cross_entropy_implementations_agree(sizes):
    mesh = zoo.make_mesh(**sizes) if sizes else zoo.make_mesh(devices=jax.devices()[:1])
    make = partial(zoo.models.Transformer, vocab=16, embed=8, layers=1, heads=4, mlp=8, tied=False)
    model = zoo.init(lambda key: make(key=key), KEY, mesh)
    tokens = jax.random.randint(KEY, (4, 6), 0, 16)
    batch = zoo.place_batch({"tokens": tokens, "targets": tokens.at[:, :2].set(-1)}, mesh)

    def run(name):
        loss = lambda model, batch: zoo.cross_entropy(model, batch, chunk=4, implementation=name)
        return zoo.value_and_grad(loss, mesh)(model, batch)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), run("reference"), run("chunked"))
    with pytest.raises(ValueError, match="loss has no implementation 'quick': there are auto, chunked, reference"):
        zoo.cross_entropy(model, batch, implementation="quick")


def numpy_cross_entropy(logits, targets):
    """PyTorch's `cross_entropy(logits, targets, ignore_index=-100, reduction="none")`."""
    logits = np.asarray(logits, np.float64)
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    return np.where(targets == -100, 0, losses)


def test_token_losses_of_targets_outside_the_vocabulary():
    """On one device and with a sharded vocabulary; the targets of the last row are just inside and just beyond it."""
    mesh = zoo.make_mesh(data=2, tensor=4)
    x = jax.random.normal(KEY, (4, 6, 16)) * 3
    head = zoo.layers.Linear(16, 16, in_=Dim("embed"), out=Dim("vocab"), key=KEY)
    targets = np.array(jax.random.randint(KEY, (4, 6), 0, 16))
    targets[:2, ::2], targets[3] = -100, [15, 16, 15, 17, -1, 2**31 - 1]
    expected, ids = numpy_cross_entropy(head(x)[:3], targets[:3]), jnp.array(targets)

    def losses(head, x, targets):
        return token_losses(head(x), targets, z_loss=0.0)

    def gradient(x):
        return jax.grad(lambda x: losses(head, x, ids).sum())(x)

    for found in (
        losses(head, x, ids),
        zoo.spmd(losses, mesh, out="batch seq")(zoo.place(head, mesh), x, ids),
        cross_entropy(head(x), ids),
    ):
        assert np.allclose(found[:3], expected, rtol=1e-5, atol=1e-5) and not np.asarray(found)[targets < 0].any()
        assert np.isnan(found[3]).tolist() == [False, True, False, True, False, True]
    gradients = np.asarray(gradient(x))
    assert not gradients[targets < 0].any() and np.isnan(gradients[targets > 15]).all()
    assert np.isfinite(gradients[targets <= 15]).all() and gradients[(0 <= targets) & (targets <= 15)].any(-1).all()


def test_loss_of_a_vocabulary_that_one_of_its_two_axes_divides():
    """98 words lie over tensor alone: embedding, tied head and loss agree with the sharding, and equal one device."""

    def loss_fn(table, batch):
        losses = token_losses(table.transposed(table(batch["tokens"])), batch["targets"])
        return losses.sum(), jnp.float32(losses.size)

    table = zoo.layers.Embedding(98, 8, key=KEY)
    tokens = jax.random.randint(KEY, (4, 9), 0, 98).at[0, 0].set(97)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    mesh = make_any_mesh(pipe=2, data=2, tensor=2)
    placed = zoo.place(table, mesh)
    assert placed.weight.sharding.spec == jax.P(("tensor",))
    loss, grads = zoo.value_and_grad(loss_fn, mesh)(placed, batch)
    expected_loss, expected = jax.value_and_grad(lambda table: loss_fn(table, batch)[0] / 32)(table)
    assert np.allclose(loss, expected_loss, rtol=1e-6)
    assert np.allclose(grads.weight, expected.weight, rtol=1e-4, atol=1e-6)


@pytest.mark.ci
@pytest.mark.parametrize(
    "sizes",
    mark_slow(
        [{"tensor": 2, "devices": jax.devices()[:2]}, {"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}],
        but=["data, fsdp, tensor"],
        name=", ".join,
    ),
)
def test_cross_entropy_ignores_negative_targets_on_any_mesh(sizes):
    model = zoo.models.Transformer(vocab=16, embed=16, layers=1, heads=2, mlp=16, key=KEY)
    tokens = jax.random.randint(KEY, (8, 4), 0, 16)
    targets = np.array(tokens)
    targets[2:7, 1:], targets[7] = -100, -1
    weights = jnp.arange(1.0, 33.0).reshape(8, 4)
    losses = numpy_cross_entropy(model(tokens), np.where(targets < 0, -100, targets)) * weights
    mesh = zoo.make_mesh(**sizes)
    batch = {"tokens": tokens, "targets": jnp.array(targets), "weights": weights}
    step = zoo.value_and_grad(lambda model, batch: zoo.cross_entropy(model, batch, chunk=7), mesh)
    loss, grads = step(zoo.place(model, mesh), zoo.place_batch(batch, mesh))
    assert np.allclose(loss, losses.sum() / np.asarray(weights)[targets >= 0].sum(), rtol=1e-5)
    masked = {"tokens": tokens, "targets": jnp.maximum(targets, 0), "weights": jnp.where(targets < 0, 0, weights)}
    expected_loss, expected = step(zoo.place(model, mesh), zoo.place_batch(masked, mesh))
    assert loss == expected_loss
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert jnp.array_equal(a, b)
    beyond = batch | {"targets": batch["targets"].at[0, 0].set(16)}
    assert jnp.isnan(step(zoo.place(model, mesh), zoo.place_batch(beyond, mesh))[0])
