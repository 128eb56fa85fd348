"""Predictors of further tokens: their loss by hand, packed texts, meshes, routers, and what cannot have them."""

import dataclasses
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import BiasedRouter, GatedDeltaNet, Mamba2
from zoo.layers.token_info import TokenInfo, pack_positions
from zoo.models import add_predictors, repeat_predictor
from zoo.models.predictors import predict_further
from zoo.parallel import SEQUENCE

VOCAB, EMBED, ROWS, SEQ = 24, 16, 4, 16
SIZES = {"vocab": VOCAB, "embed": EMBED, "layers": 2, "mlp": 32}
DOCUMENTS = jnp.array([[1] * 16, [1] * 7 + [2] * 9, [1] * 2 + [2] * 10 + [0] * 4, [1] * 15 + [2]])


def make_attention(count=2, **options):
    model = zoo.models.Transformer(**SIZES, heads=4, key=jax.random.key(0), **options)
    return scale(add_predictors(model, count, key=jax.random.key(1)))


def make_hybrid():
    pattern = [partial(GatedDeltaNet, heads=2), partial(Mamba2, head_dim=16)]
    model = zoo.models.Hybrid(**SIZES, pattern=pattern, key=jax.random.key(0))
    return scale(add_predictors(model, 2, key=jax.random.key(1)))


def make_mixture():
    router = partial(BiasedRouter, renormalize=True)
    model = zoo.models.MixtureOfExperts(**SIZES, heads=4, experts=4, top=2, router=router, key=jax.random.key(0))
    return add_predictors(model, 1, key=jax.random.key(1))


def scale(model):
    """Give norms, which begin alike, different weights."""
    keys = iter(jax.random.split(jax.random.key(5), len(jax.tree.leaves(model))))
    return jax.tree.map(lambda x: x * jax.random.uniform(next(keys), x.shape, minval=0.5, maxval=1.5), model)


def make_batch(documents=True):
    keys = jax.random.split(jax.random.key(2), 3)
    tokens, targets = (jax.random.randint(key, (ROWS, SEQ), 0, VOCAB) for key in keys[:2])
    weights = jax.random.uniform(keys[2], (ROWS, SEQ))
    batch = {"tokens": tokens, "targets": targets.at[0, 5].set(-1), "weights": weights}
    if not documents:
        return batch
    batch["targets"] = jnp.where(DOCUMENTS == 0, -1, batch["targets"])
    return batch | {"segment_ids": DOCUMENTS, "positions": pack_positions(DOCUMENTS)}


def mean_loss(model, batch, key=None, **options):
    total, count = zoo.cross_entropy(model, batch, predictors=0.3, **options)
    return total / count


def losses_of_documents(model, batch):
    """The losses of each depth, document by document, from the module written out: no shifts of arrays, no segments."""
    depths = sum(predictor.depths for predictor in model.predictors)
    sums = np.zeros((depths + 1, 2))
    for row in range(ROWS):
        for number in range(1, int(DOCUMENTS[row].max()) + 1):
            places = np.flatnonzero(DOCUMENTS[row] == number)
            text = batch["tokens"][row][places][None]
            x = model.hidden(text, TokenInfo())[0].x
            used = [predictor for predictor in model.predictors for _ in range(predictor.depths)]
            for depth in range(depths + 1):
                if depth:
                    module = used[depth - 1]
                    read = model.embedding(text[:, depth:])
                    if not read.shape[1]:
                        break
                    pair = [module.embedding_norm(read), module.state_norm(x[:, :-1])]
                    hidden = zoo.models.Hidden(module.projection(jnp.concatenate(pair, axis=-1)))
                    for block in module.layers:
                        hidden, _ = block(hidden, TokenInfo())
                    x = module.norm(hidden.x)
                targets, weights = (batch[name][row][places][depth:] for name in ("targets", "weights"))
                losses = zoo.models.token_losses(model.logits(x)[0], targets)
                weights = jnp.where(targets < 0, 0, weights)
                sums[depth] += float((losses * weights).sum()), float(weights.sum())
    means = sums[:, 0] / sums[:, 1]
    return means[0] + 0.3 * means[1:].mean()


@pytest.mark.one_case
@pytest.mark.parametrize("make", [make_attention, make_hybrid, lambda: repeat_predictor(make_attention(1), 3)])
def test_loss_is_that_of_each_document_by_itself(make):
    """With weights, ignored targets, padding, a document of one token, and a module that is used three times."""
    model, batch = make(), make_batch()
    assert eqx.filter_jit(mean_loss)(model, batch) == pytest.approx(losses_of_documents(model, batch), rel=1e-5)


def test_gradient_reaches_predictors_only_if_they_are_trained():
    model, batch = make_attention(), make_batch(documents=False)

    @eqx.filter_jit
    def differentiate(model):
        trained = eqx.filter_grad(mean_loss)(model, batch)
        plain = eqx.filter_grad(lambda model: zoo.cross_entropy(model, batch)[0] / batch["weights"].sum())(model)
        return trained, plain

    trained, plain = differentiate(model)
    assert all(x.any() for x in jax.tree.leaves(trained))
    assert not any(x.any() for x in jax.tree.leaves(plain.predictors))
    assert not np.allclose(trained.embedding.weight, plain.embedding.weight)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("make", "axes", "layout"),
    [
        (make_attention, {"data": 2, "fsdp": 2, "tensor": 2}, None),
        (make_attention, {"data": 2, "context": 2, "tensor": 2}, None),
        (partial(make_attention, remat="full"), {"data": 2, "fsdp": 2, "tensor": 2}, SEQUENCE),
        (make_hybrid, {"data": 2, "fsdp": 2, "context": 2}, None),
    ],
)
def test_mesh_loss_and_gradients_equal_one_device(make, axes, layout):
    model, batch = make(), make_batch()
    expected, gradients = eqx.filter_jit(eqx.filter_value_and_grad(mean_loss))(model, batch)
    mesh = zoo.make_mesh(**axes, **({} if layout is None else {"layout": layout}))
    loss_fn = lambda model, batch, key=None: zoo.cross_entropy(model, batch, predictors=0.3)
    loss, found = zoo.value_and_grad(loss_fn, mesh)(zoo.place(model, mesh), batch)
    assert loss == pytest.approx(float(expected), rel=1e-5)
    largest = max(np.abs(y).max() for y in jax.tree.leaves(gradients))
    for x, y in zip(jax.tree.leaves(jax.device_get(found)), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5 * np.abs(y).max() + 1e-7 * largest)


def test_micro_batches_of_equal_rows_are_one_batch():
    model, batch = make_attention(1), make_batch(documents=False)
    batch = {"tokens": batch["tokens"], "targets": jnp.abs(batch["targets"])}
    mesh = zoo.make_mesh(data=2, devices=jax.devices()[:2])
    loss_fn = lambda model, batch, key=None: zoo.cross_entropy(model, batch, predictors=0.3)
    loss, _ = zoo.value_and_grad(loss_fn, mesh, microbatches=2)(zoo.place(model, mesh), batch)
    assert loss == pytest.approx(float(eqx.filter_jit(mean_loss)(model, batch)), rel=1e-5)


def test_routers_of_predictors_count_and_their_bias_moves():
    model, batch = make_mixture(), make_batch(documents=False)

    @eqx.filter_jit
    def run(model, **options):
        (loss, _), routing = zoo.models.cross_entropy_and_routing(model, batch, **options)
        return loss, [zoo.models.tokens_per_expert(layer) for layer in routing]

    loss, loads = run(model, predictors=0.3)
    assert len(loads) == 3
    assert run(model, predictors=0.3, balance=0.1)[0] > loss
    moved = zoo.models.update_expert_bias(model, loads, rate=0.01)
    bias = moved.predictors[0].layers[0].ffn.router.selection_bias
    np.testing.assert_allclose(bias, 0.01 * np.sign(loads[2].mean() - loads[2]), atol=1e-7)
    frozen = zoo.models.update_expert_bias(model, loads[:2], rate=0.01)
    assert not frozen.predictors[0].layers[0].ffn.router.selection_bias.any()
    twice = run(repeat_predictor(model, 2), predictors=0.3)[1]
    assert len(twice) == 3 and twice[2].sum() == 2 * loads[2].sum()
    with pytest.raises(ValueError, match="4 loads were given, and 3 layers have a router"):
        zoo.models.update_expert_bias(model, [*loads, loads[0]])


def test_what_cannot_be_is_refused_by_name():
    model, batch = make_attention(), make_batch(documents=False)
    with pytest.raises(ValueError, match=r"no modules that predict further tokens.*add_predictors"):
        mean_loss(dataclasses.replace(model, predictors=()), batch)
    with pytest.raises(ValueError, match="count=0"):
        add_predictors(model, 0, key=jax.random.key(0))
    with pytest.raises(ValueError, match="depths=0"):
        repeat_predictor(model, 0)
    looped = zoo.models.Looped(vocab=VOCAB, embed=EMBED, heads=4, mlp=16, core=1, loops=2, key=jax.random.key(0))
    with pytest.raises(NotImplementedError, match="reads what other layers share"):
        add_predictors(looped, key=jax.random.key(0))
    mesh = zoo.make_mesh(pipe=2, data=4)
    loss_fn = lambda model, batch, key=None: zoo.cross_entropy(model, batch, predictors=0.3)
    with pytest.raises(NotImplementedError, match=r"predictors read.*pipe=1"):
        zoo.value_and_grad(loss_fn, mesh)(zoo.place(model, mesh), batch)


def test_a_model_without_a_family_for_predictors_is_not_saved(tmp_path):
    with pytest.raises(zoo.CheckpointError, match="llama: predictors has 2 parts, not 0"):
        zoo.save(make_attention(), tmp_path)


def test_predictions_do_not_depend_on_later_tokens():
    """Row i of depth k reads tokens up to i + k."""
    model = make_attention()
    tokens = make_batch()["tokens"]

    @eqx.filter_jit
    def run(tokens):
        x = model.hidden(tokens, TokenInfo())[0].x
        return predict_further(model, tokens, TokenInfo(), x)[0]

    before, after = run(tokens), run(tokens.at[:, 9].set((tokens[:, 9] + 1) % VOCAB))
    for depth, (x, y) in enumerate(zip(before, after, strict=True), start=1):
        np.testing.assert_array_equal(x[:, : 9 - depth], y[:, : 9 - depth])
        assert (np.asarray(x)[:, 9 - depth] != np.asarray(y)[:, 9 - depth]).any()
