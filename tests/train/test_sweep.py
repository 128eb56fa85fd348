"""Sweeps: each run equals a single run with the same start, optimizer and values."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from zoo import train

RATES, SEEDS = (1e-3, 1e-2), (0, 5)


def make(key):
    return zoo.models.Transformer(vocab=11, embed=8, layers=1, heads=2, mlp=8, key=key)


@pytest.fixture(scope="module")
def batches():
    tokens = jax.random.randint(jax.random.key(1), (3, 4, 7), 0, 11)
    return [{"tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": jnp.ones((4, 6)).at[:, 0].set(0)}
            for rows in tokens]  # fmt: skip


def make_adamw(schedule):
    adamw = optax.adamw(schedule, weight_decay=0.1, mask=train.decay_mask)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def make_optimizer(rate):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, 1, 3)
    return make_adamw(lambda step: rate * schedule(step))


@pytest.fixture(scope="module")
def swept(batches):
    rates, keys = train.sweep_grid(RATES, SEEDS)
    models, opt_states = train.sweep_init(make, make_optimizer, rates, keys)
    step, metrics = train.sweep_step(zoo.cross_entropy, make_optimizer), []
    for batch in batches:
        models, opt_states, logged = step(batch, models, opt_states, rates)
        metrics.append(logged)
    return models, {name: np.array([logged[name] for logged in metrics]) for name in metrics[0]}


def test_sweep_grid_is_every_rate_with_every_seed():
    rates, keys = train.sweep_grid(RATES, SEEDS)
    assert rates.tolist() == pytest.approx([1e-3, 1e-3, 1e-2, 1e-2])
    assert jax.random.key_data(keys).tolist() == [
        jax.random.key_data(jax.random.key(seed)).tolist() for seed in SEEDS * 2
    ]


@pytest.mark.parametrize(("rates", "seeds"), [((), (0,)), ((1e-3,), ()), ((1e-3, 0.0), (0,)), ((-1.0,), (0,))])
def test_sweep_grid_refuses_empty_lists(rates, seeds):
    with pytest.raises(ValueError, match="a sweep wants learning rates above 0, and seeds"):
        train.sweep_grid(rates, seeds)


@pytest.mark.ci
def test_sweep_step_equals_single_runs(swept, batches):
    """With the rate given to optax, one model, and the library's own gradient."""
    run = 3
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    model = zoo.init(make, jax.random.key((SEEDS * 2)[run]), mesh)
    optimizer = make_adamw(optax.warmup_cosine_decay_schedule(0.0, np.repeat(RATES, 2)[run], 1, 3))
    opt_state = optimizer.init(zoo.trainable(model))

    @eqx.filter_jit
    def step(batch, model, opt_state):
        loss, grads = zoo.value_and_grad(zoo.cross_entropy, mesh)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        norm = optax.tree.norm(grads)  # before clipping
        return jax.tree.map(lambda p, u: p + u, model, updates), opt_state, loss, norm

    for number, batch in enumerate(batches):
        model, opt_state, loss, norm = step(zoo.place_batch(batch, mesh), model, opt_state)
        assert float(loss) == pytest.approx(swept[1]["losses"][number, run], abs=1e-5)
        assert float(norm) == pytest.approx(swept[1]["gradient_norm"][number, run], rel=1e-4)
    for alone, stacked in zip(jax.tree.leaves(model), jax.tree.leaves(swept[0]), strict=True):
        np.testing.assert_allclose(stacked[run], alone, atol=2e-5)


def test_sweep_map_vmaps_over_runs(swept, batches):
    models, _ = swept
    logits = train.sweep_map(lambda model, tokens: model(tokens))(models, batches[0]["tokens"])
    assert logits.shape == (4, 4, 6, 11)
    assert not jnp.allclose(logits[0], logits[1]) and not jnp.allclose(logits[0], logits[2])


@pytest.mark.slow
def test_sweep_step_keeps_frozen_leaves_and_dtypes_and_donates(batches):
    router = zoo.layers.BiasedRouter
    sizes = {"vocab": 11, "embed": 8, "layers": 1, "heads": 2, "mlp": 8, "experts": 2, "top": 1}
    rates, keys = train.sweep_grid((0.1,), (0, 1))
    models, opt_states = train.sweep_init(partial(zoo_mixture, sizes, router), optax.adamw, rates, keys)
    before = [leaf + 0 for leaf in jax.tree.leaves(models)]
    given = jax.tree.leaves(models)
    after, _, _ = train.sweep_step(zoo.cross_entropy, optax.adamw)(batches[0], models, opt_states, rates)
    assert all(leaf.is_deleted() for leaf in given)
    assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [leaf.dtype for leaf in before]
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(after)]
    still = {name for name, a, b in zip(names, before, jax.tree.leaves(after), strict=True) if jnp.array_equal(a, b)}
    assert len(still) == 1 and "bias" in still.pop()


def zoo_mixture(sizes, router, key):
    return zoo.cast(zoo.models.MixtureOfExperts(**sizes, router=router, key=key), "bfloat16")


@pytest.mark.ci
def test_sweep_step_divides_by_small_counts(batches):
    """Weights may sum to less than 1; a batch without weights has a loss of 0."""

    def find_losses(scale):
        def loss_fn(model, batch):
            total, count = zoo.cross_entropy(model, batch)
            return total * scale, count * scale

        rates, keys = train.sweep_grid((0.1,), (0, 1))
        models, opt_states = train.sweep_init(make, optax.sgd, rates, keys)
        return train.sweep_step(loss_fn, optax.sgd)(batches[0], models, opt_states, rates)[2]["losses"]

    np.testing.assert_allclose(find_losses(1e-3), find_losses(1.0), rtol=1e-6)
    assert not find_losses(0.0).any()
