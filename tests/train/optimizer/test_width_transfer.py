"""muP: factors by the table, nothing at the base width, and activations that do not depend on the width."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from zoo import models, train

SEEN_AFTER = (1, 3, 10)
TOKENS = jax.random.randint(jax.random.key(1), (2, 5), 0, 64)
BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}


def make(width, *, tied=False, heads=4, key=None):
    key = jax.random.key(0) if key is None else key
    return models.Transformer(vocab=64, embed=width, layers=2, heads=heads, mlp=2 * width, tied=tied, key=key)


def make_base(build, width):
    return eqx.filter_eval_shape(partial(build, width))


def make_optimizer(base, rate):
    scale = optax.identity() if base is None else train.scale_by_width(base)
    return optax.chain(optax.scale_by_adam(b2=0.95), scale, optax.scale(-rate))


def record_sizes(model, optimizer):
    """Return the mean size of every value of the forward pass after some steps, by step and name."""
    names = [name for name in zoo.capture_names(model, BATCH["tokens"]) if not name.endswith("input")]

    def compute_loss(model):
        logits, seen = zoo.capture(model, *names)(BATCH["tokens"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, BATCH["targets"])
        return losses.mean(), seen | {"logits": logits}

    @eqx.filter_jit
    def step(model, opt_state):
        gradients, seen = eqx.filter_grad(compute_loss, has_aux=True)(model)
        updates, opt_state = optimizer.update(zoo.trainable(gradients), opt_state, zoo.trainable(model))
        return eqx.apply_updates(model, updates), opt_state, jax.tree.map(lambda x: jnp.abs(x).mean(), seen)

    opt_state = optimizer.init(zoo.trainable(model))
    sizes = {}
    for i in range(max(SEEN_AFTER) + 1):
        model, opt_state, seen = step(model, opt_state)
        if i in SEEN_AFTER:
            sizes |= {(i, name): float(size) for name, size in seen.items()}
    return sizes


def fit_slopes(build, widths, rate, *, transfers=True):
    """Return the slope of log size over log width of every value, by step and name. The head is zero at first: the
    random logits of muP shrink as 1 / sqrt(width), which hides what is learned."""
    base = make_base(build, widths[0])
    rows = []
    for width in widths:
        model = build(width)
        if transfers:
            model = train.transfer_width(model, base)
        if model.head is not None:
            model = eqx.tree_at(lambda model: model.head.weight, model, jnp.zeros_like(model.head.weight))
        rows.append(record_sizes(model, make_optimizer(base if transfers else None, rate)))
    return {key: np.polyfit(np.log(widths), np.log([row[key] for row in rows]), 1)[0] for key in rows[0]}


def check_slopes(slopes, *, leave_out=()):
    steep = {key: slope for key, slope in slopes.items() if abs(slope) > 0.1 and key[1] not in leave_out}
    assert not steep


@pytest.mark.ci
def test_activations_do_not_depend_on_the_width():
    """With heads of any size: 8 to 64 features each."""
    check_slopes(fit_slopes(make, (32, 64, 128, 256), 3e-3))


@pytest.mark.slow
def test_activations_of_a_tied_head_and_of_more_heads():
    """The logits of a tied head are random at first, and shrink with the width."""
    check_slopes(fit_slopes(partial(make, tied=True), (32, 64, 128, 256), 3e-3), leave_out=("logits",))
    check_slopes(fit_slopes(lambda width: make(width, heads=width // 16), (64, 128, 256, 512), 3e-3))


@pytest.mark.slow
def test_standard_activations_grow_with_the_width():
    """The check can fail: without the factors, hidden states grow and embeddings shrink."""
    slopes = fit_slopes(make, (32, 64, 128, 256), 3e-3, transfers=False)
    assert slopes[10, "layers.*"] > 0.3 and slopes[1, "embedding"] < -0.4


def test_factors_follow_the_table():
    """A mixture of four times the width, with router and head; heads of four times the size."""
    build = lambda width: models.MixtureOfExperts(
        vocab=16, embed=width, layers=2, heads=2, mlp=3 * width, experts=4, top=2, tied=False, key=jax.random.key(0)
    )
    model, base = build(32), make_base(build, 8)
    rates, init = train.width_factors(zoo.trainable(model), base)
    names = [path.name.split(".")[-2] for path in models.list_parameter_paths(zoo.trainable(model))]
    found = dict(zip(names, zip(jax.tree.leaves(rates), jax.tree.leaves(init), strict=True), strict=True))
    hidden = dict.fromkeys(("query", "key", "value", "out", "gate", "up", "down"), (1 / 4, 1.0))
    norms = dict.fromkeys(("mixer_norm", "ffn_norm", "norm"), (1.0, 1.0))
    assert found == hidden | norms | {"embedding": (1.0, 2.0), "head": (1 / 4, 1 / 2), "scores": (1 / 4, 1 / 2)}
    moved = train.transfer_width(model, base)
    np.testing.assert_array_equal(moved.head.weight, model.head.weight / 2)
    (block,) = moved.stack.segments[0].blocks
    assert block.mixer.scale == pytest.approx(16**-0.5 / 2) and moved.logits_multiplier == 1
    updates, _ = train.scale_by_width(base).update(zoo.trainable(model), optax.EmptyState())
    np.testing.assert_array_equal(updates.head.weight, model.head.weight / 4)


def test_a_tied_head_multiplies_logits():
    moved = train.transfer_width(make(32, tied=True), make_base(partial(make, tied=True), 8))
    assert moved.logits_multiplier == 1 / 4


def test_nothing_changes_at_the_base_width():
    model = make(16)
    assert eqx.tree_equal(train.transfer_width(model, make_base(make, 16)), model)


def test_other_models_raise():
    with pytest.raises(ValueError, match=r"the base model has no head.weight: let it be the same model with other"):
        train.transfer_width(make(16), make_base(partial(make, tied=True), 8))
    build = lambda width: models.GLA(vocab=16, embed=width, layers=1, heads=2, mlp=16, key=jax.random.key(0))
    with pytest.raises(NotImplementedError, match="GatedLinearAttention has heads of other sizes than in the base"):
        train.transfer_width(build(32), make_base(build, 16))
