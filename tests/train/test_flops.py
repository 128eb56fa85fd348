"""FLOPs of a training step, by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp

import zoo
from zoo.train.flops import count_step_flops

TOKENS = jnp.zeros((4, 16), jnp.int32)


def make(key, **options):
    return zoo.models.Transformer(vocab=32, embed=8, layers=4, heads=2, mlp=16, **options, key=key)


def test_flops_are_three_times_those_of_all_products():
    model = eqx.filter_eval_shape(make, jax.random.key(0))
    of_layer = 4 * 8 * 8 + 3 * 8 * 16 + 2 * 8 * 16  # projections, MLP, scores and sums of 16 keys
    expected = 3 * 2 * TOKENS.size * (4 * of_layer + 8 * 32)
    assert count_step_flops(model, TOKENS) == expected
    looped = eqx.filter_eval_shape(make, jax.random.key(0), order=2 * [0, 1, 2, 3])
    assert count_step_flops(looped, TOKENS) == expected + 3 * 2 * TOKENS.size * 4 * of_layer


def test_flops_on_a_mesh_and_with_adapters():
    model = make(jax.random.key(0))
    mesh = zoo.make_mesh(data=1, pipe=2, layout=zoo.Layout(rounds=2), devices=jax.devices()[:2])
    assert count_step_flops(zoo.place(model, mesh), TOKENS) == count_step_flops(model, TOKENS)
    adapted = eqx.filter_eval_shape(zoo.adapters.lora, model, rank=2, key=jax.random.key(1))
    assert count_step_flops(adapted, TOKENS) == 0
    assert count_step_flops({"a table": TOKENS}, TOKENS) == 0
    for implementation in ("cudnn", "splash"):  # which CPUs do not have
        assert count_step_flops(zoo.configure(model, attention=implementation), TOKENS) == 0
