"""float16 with a dynamic loss scale: the same on any mesh, skipped steps too, and needed where gradients are small."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from zoo import train


def loss_fn(model, batch):
    return zoo.cross_entropy(zoo.cast(model, jnp.float16), batch)


def run_float16(mesh, optimizer, *, steps, weight=1.0, initial=None):
    """Return the loss scale, the skipped steps and the loss after each of some steps of float16."""
    make = lambda key: zoo.models.Transformer(vocab=16, embed=16, layers=1, heads=2, mlp=16, key=key)
    model = zoo.init(make, jax.random.key(0), mesh)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)
    tokens = jax.random.randint(jax.random.key(1), (8, 9), 0, 16)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": jnp.full((8, 8), weight)}
    batch = zoo.place_batch(batch, mesh)

    @eqx.filter_jit
    def step(batch, model, opt_state):
        scale = train.loss_scale(opt_state)
        loss, gradients = zoo.value_and_grad(loss_fn, mesh)(model, batch, loss_scale=scale)
        updates, opt_state = optimizer.update(gradients, opt_state, zoo.trainable(model))
        return zoo.place(eqx.apply_updates(model, updates), mesh), opt_state, loss

    history = []
    for _ in range(steps):
        model, opt_state, loss = step(batch, model, opt_state)
        counts = {"loss_scale": 1.0, "skipped_steps": 0, **train.count_skips(opt_state)}
        history.append([float(x) for x in (counts["loss_scale"], counts["skipped_steps"], loss)])
    return np.array(history).T, jax.device_get(eqx.filter(model, eqx.is_array))


@pytest.mark.slow
def test_loss_scale_is_one_decision_on_any_mesh():
    """A scale that overflows is halved until it fits, on one device and on eight. Just below the largest value, sums
    over the tokens of one device may overflow where those of eight do not: the scale does not grow back to there."""
    optimizer = train.dynamic_loss_scale(optax.adam(1e-2), initial=2.0**16, growth_interval=4)
    serial = zoo.make_mesh(devices=jax.devices()[:1])
    (scales, skipped, losses), _ = run_float16(serial, optimizer, steps=7)
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2, devices=jax.devices()[:8])
    parallel, _ = run_float16(mesh, optimizer, steps=7)
    overflows = int(skipped[-1])
    assert overflows >= 2 and scales[:overflows].tolist() == [2.0 ** (15 - i) for i in range(overflows)]
    assert (losses[: overflows + 1] == losses[0]).all() and losses[-1] < losses[0]  # a skipped step changes nothing
    np.testing.assert_array_equal(parallel[:2], [scales, skipped])
    np.testing.assert_allclose(parallel[2], losses, rtol=2e-3)


@pytest.mark.slow  # docs/precision.md trains with one
def test_small_gradients_train_with_a_loss_scale_alone():
    """Token weights of 1e-8 leave the mean as it is, and gradients in the backward pass below float16's smallest."""
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    (_, _, losses), model = run_float16(mesh, optax.sgd(0.5), steps=3, weight=1e-8)
    assert losses[0] == losses[-1]
    scaled = train.dynamic_loss_scale(optax.sgd(0.5), initial=2.0**24)
    (_, skipped, losses), trained = run_float16(mesh, scaled, steps=3, weight=1e-8)
    assert losses[-1] < losses[0] - 0.01 and skipped[-1] == 0
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), model, trained)
    assert all(jax.tree.leaves(moved))


def test_loss_scale_doubles_after_good_steps():
    optimizer = train.dynamic_loss_scale(optax.sgd(0.1), initial=8, growth_interval=2, maximum=32, minimum=4)
    state, params, scales = optimizer.init(jnp.ones(2)), jnp.ones(2), []
    for gradient in (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, np.nan, 1.0, np.inf, np.nan, np.nan, 1.0, 1.0):
        _, state = optimizer.update(jnp.full(2, gradient), state, params)
        scales.append(int(train.loss_scale(state)))
    assert scales == [8, 16, 16, 32, 32, 32, 16, 16, 8, 4, 4, 4, 8]  # within its bounds


def test_loss_scale_of_other_optimizers_is_none():
    assert train.loss_scale(optax.adam(1e-3).init(jnp.zeros(2))) is None
    scaled = optax.chain(optax.identity(), train.dynamic_loss_scale(optax.adam(1e-3), initial=8))
    assert float(train.loss_scale(scaled.init(jnp.zeros(2)))) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial": 1000}, "powers of two"),
        ({"minimum": 0}, "powers of two"),
        ({"initial": 2.0**30}, "within its bounds"),
        ({"growth_interval": 0}, "growth_interval=0"),
    ],
)
def test_wrong_options_of_a_loss_scale_raise(options, message):
    with pytest.raises(ValueError, match=message):
        train.dynamic_loss_scale(optax.sgd(1.0), **options)


@pytest.mark.slow
def test_presets_compute_in_float16():
    """Attention, a mixture, Mamba and a delta rule: finite, and as near float32 as its 11 bits are."""
    layers = zoo.layers
    factories = [
        partial(layers.Attention, heads=2),
        partial(layers.Mamba2, head_dim=16, state_dim=8),
        partial(layers.GatedDeltaNet, heads=2),
        partial(layers.MLSTM, heads=2),
    ]
    model = zoo.models.Hybrid(vocab=64, embed=32, layers=4, mlp=64, pattern=factories, key=jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 24), 0, 64)
    run = eqx.filter_jit(lambda model, tokens: model(tokens))
    exact, half = run(model, tokens), run(zoo.cast(model, jnp.float16), tokens)
    assert half.dtype == jnp.float16
    assert np.abs(exact - half).max() < 0.02 * np.abs(exact).max()
