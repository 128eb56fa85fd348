"""Observed models: the same results, the right maxima on any mesh, and the layer in which a value overflowed."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers.token_info import token_info
from zoo.models import find_first_nonfinite, observe, tabulate_observations, unobserve
from zoo.models.stack import swap_stack
from zoo.parallel import SEQUENCE

KEY = jax.random.key(0)


def make(key, layers=3):
    return zoo.models.Transformer(vocab=32, embed=16, layers=layers, heads=2, mlp=32, key=key)


def make_batch(rows=8, seq=8):
    tokens = jax.random.randint(jax.random.key(1), (rows, seq + 1), 0, 32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def observe_step(model, mesh, **options):
    """Return loss, gradients and the table of a step of the observed model."""
    model = zoo.place(observe(model), mesh)
    step = zoo.value_and_grad(zoo.cross_entropy, mesh, observe=True, **options)
    loss, gradients, seen = step(model, zoo.place_batch(make_batch(), mesh))
    return loss, gradients, seen


@pytest.fixture(scope="module")
def expected():
    """Maxima computed from hidden states, and from gradients with respect to perturbations of them."""
    model, batch = make(KEY), make_batch()
    states, logits = zoo.hidden_states(model, batch["tokens"]), model(batch["tokens"])
    blocks = list(model.stack.iter_blocks())
    info = token_info(batch["tokens"])

    def loss(perturbations):
        hidden = model.embed(batch["tokens"], info)
        outputs = []
        for block, perturbation in zip(blocks, perturbations, strict=True):
            hidden, _ = block(hidden, info)
            hidden = zoo.models.Hidden(hidden.x + perturbation)
            outputs.append(jnp.abs(hidden.x).max())
        logits = model.logits(model.norm(hidden.x))
        return zoo.models.token_losses(logits, batch["targets"]).sum(), outputs

    gradients, outputs = jax.grad(loss, has_aux=True)([jnp.zeros_like(states[0])] * 3)
    table = {f"layers.{i}": (float(outputs[i]), float(jnp.abs(gradients[i]).max())) for i in range(3)}
    return {**table, "logits": (float(jnp.abs(logits).max()), None)}


MESHES = {
    "one device": {},
    "data x fsdp x tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "sequence": {"fsdp": 2, "tensor": 2, "layout": SEQUENCE},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_observations_are_the_maxima_on_any_mesh(name, microbatches, expected):
    count = int(np.prod([size for size in MESHES[name].values() if isinstance(size, int)]))
    mesh = zoo.make_mesh(**MESHES[name], devices=jax.devices()[:count])
    model = make(KEY)
    loss, gradients, seen = observe_step(model, mesh, microbatches=microbatches)
    table = tabulate_observations(seen)
    assert list(table) == list(expected)
    for layer, (output, gradient) in expected.items():
        assert table[layer][0] == pytest.approx(output, rel=1e-5), layer
        assert gradient is None or table[layer][1] == pytest.approx(gradient, rel=1e-4), layer
    assert find_first_nonfinite(seen) is None
    if name == "one device":
        plain_loss, plain = zoo.value_and_grad(zoo.cross_entropy, mesh)(model, make_batch())
        np.testing.assert_allclose(loss, plain_loss, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), unobserve(gradients), plain)


@pytest.mark.slow  # docs/precision.md finds one
@pytest.mark.parametrize("name", ["one device", "data x fsdp x tensor"])
def test_planted_overflow_is_found_in_its_layer(name):
    """In float16: weights of layer 1 whose products overflow, and a loss scale that lets gradients overflow alone."""
    mesh = zoo.make_mesh(**MESHES[name], devices=jax.devices()[: 8 if MESHES[name] else 1])
    batch = zoo.place_batch(make_batch(), mesh)
    in_float16 = lambda model, batch: zoo.cross_entropy(zoo.cast(model, jnp.float16), batch)
    step = zoo.value_and_grad(in_float16, mesh, observe=True)
    where, model = lambda model: model.stack.segments[0].blocks[0].block.ffn.down.weight, observe(make(KEY))
    planted = eqx.tree_at(where, model, where(model).at[1].multiply(2e5))
    assert np.isfinite(jnp.float16(where(planted))).all()
    _, _, seen = step(zoo.place(planted, mesh), batch, loss_scale=1.0)
    assert find_first_nonfinite(seen) == "the output of layers.1"
    _, _, seen = step(zoo.place(model, mesh), batch, loss_scale=2.0**24)
    assert find_first_nonfinite(seen) == "the gradient of layers.2"
    assert np.isfinite([output for output, _ in tabulate_observations(seen).values()]).all()


@pytest.mark.ci
def test_observing_changes_neither_paths_nor_results():
    model = make(KEY)
    watched = observe(model)
    assert zoo.count(watched) == zoo.count(model)
    names = lambda tree: [path.name for path in zoo.models.list_parameter_paths(zoo.trainable(tree))]
    assert names(watched) == names(model)
    assert eqx.tree_equal(unobserve(watched), model)
    tokens = make_batch()["tokens"]
    np.testing.assert_array_equal(watched(tokens), model(tokens))
    with pytest.raises(ValueError, match="observed already"):
        observe(watched)
    with pytest.raises(ValueError, match="UnrolledStack: swap in a Stack"):
        observe(swap_stack(model, zoo.models.Stack.unstack))
