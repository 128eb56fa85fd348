"""Differential attention equals its formula, reference values, a cache in pieces, packed rows and meshes."""

import os
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from tests.parity_ops import distance
from tests.quick import mark_slow
from zoo.layers import DifferentialAttention, RMSNorm, TokenInfo
from zoo.layers.attention.base import attend
from zoo.layers.attention.differential import compute_lambda_init, pad_queries
from zoo.ops.rotary import Rotary, apply_rotary
from zoo.tools.testing import check_mixer

MORE = os.environ.get("ZOO_PARITY")
ROTARY, WINDOW, SEQ = Rotary(4), 5, 8
OPTIONS = {"kv_heads": 2, "rotary": ROTARY, "window": WINDOW, "bias": True, "depth": 3}
LAMBDAS = {"lq1": "lambda_q1", "lk1": "lambda_k1", "lq2": "lambda_q2", "lk2": "lambda_k2"}


def compute_formula(layer, x):
    """Two softmax maps of four heads with the whole mask, and the norm of each head's difference."""
    cos, sin = ROTARY(jnp.arange(SEQ))
    project = lambda linear: x @ linear.weight.T + linear.bias
    split = lambda linear: apply_rotary(project(linear).reshape(*x.shape[:2], -1, 4), cos, sin)
    query, key = split(layer.query), jnp.repeat(split(layer.key).reshape(*x.shape[:2], 2, 2, 4), 2, axis=2)
    value = jnp.repeat(project(layer.value).reshape(*x.shape[:2], 2, 8), 2, axis=2)
    age = jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)
    scores = jnp.einsum("bqhmd,bkhmd->bhmqk", query.reshape(*x.shape[:2], 4, 2, 4), key) / 2
    maps = jax.nn.softmax(jnp.where((age >= 0) & (age < WINDOW), scores, -jnp.inf), axis=-1)
    dot = lambda q, k: jnp.exp(jnp.dot(q, k))
    strength = dot(layer.lambda_q1, layer.lambda_k1) - dot(layer.lambda_q2, layer.lambda_k2) + layer.lambda_init
    heads = jnp.einsum("bhqk,bkhd->bqhd", maps[:, :, 0] - strength * maps[:, :, 1], value)
    heads = layer.norm.weight * heads / jnp.sqrt((heads**2).mean(-1, keepdims=True) + 1e-5)
    return ((1 - layer.lambda_init) * heads).reshape(*x.shape[:2], -1) @ layer.out.weight.T


@eqx.filter_jit
def run_all(layer, x):
    state, outputs, positions = layer.init_state(2, SEQ), [], jnp.broadcast_to(jnp.arange(SEQ), (2, SEQ))
    for start, stop in ((0, 4), (4, 5), (5, 8)):
        output, state = layer(x[:, start:stop], TokenInfo(positions[:, start:stop]), state)
        outputs.append(output)
    return layer(x, TokenInfo())[0], compute_formula(layer, x), jnp.concatenate(outputs, 1)


def test_differential_attention_equals_formula_and_cache():
    make = partial(DifferentialAttention, 32, 4, **OPTIONS)
    layer = eqx.combine(randomize(lambda key: zoo.trainable(make(key=key))), make(key=jax.random.key(0)))
    ours, expected, cached = run_all(layer, activations(2, SEQ, 32))
    assert relative_error(ours, expected) < 1e-5
    assert relative_error(cached, expected) < 1e-5
    cache = eqx.filter_eval_shape(layer.init_state, 2, 4)
    assert cache.key.shape == cache.value.shape == (2, 2, 4, 8), "both keys of a head lie in one cache"


def test_lambda_init_grows_with_the_depth():
    np.testing.assert_allclose([compute_lambda_init(depth) for depth in (0, 3)], [0.2, 0.8 - 0.6 * np.exp(-0.9)])
    layer = DifferentialAttention(8, 2, depth=3, key=jax.random.key(0))
    assert zoo.trainable(layer).lambda_init is None and zoo.cast(layer, jnp.bfloat16).lambda_init.dtype == jnp.float32
    with pytest.raises(ValueError, match="head_dim=3 features of a head do not divide evenly over two queries"):
        DifferentialAttention(8, 2, head_dim=3, key=jax.random.key(0))


CHECKED = partial(DifferentialAttention, 16, 4, kv_heads=2, rotary=Rotary(2), window=4)


@pytest.mark.ci
def test_differential_attention_keeps_its_promises():
    check_mixer(CHECKED, meshes=[zoo.make_mesh(data=2, context=2, tensor=2)])


@pytest.mark.slow
def test_more_meshes_equal_one_device():
    check_mixer(CHECKED, meshes=[zoo.make_mesh(data=2, fsdp=2, tensor=2), zoo.make_mesh(1, context=4, tensor=2)])


@pytest.mark.one_case("slow")
@pytest.mark.skipif(not MORE, reason="ZOO_PARITY names no folder of reference cases")
@pytest.mark.parametrize("implementation", ["grouped", "blockwise"])
@pytest.mark.parametrize("variant", mark_slow(["base", "even", "one"], but=["base"]))
def test_differential_attention_equals_reference_values(variant, implementation):
    """In float64: outputs, and the gradient of every input."""
    arrays = load_file(Path(str(MORE)) / "ops_more" / f"differential_attention.{variant}.safetensors")
    inputs = {name.removeprefix("in."): jnp.asarray(x) for name, x in arrays.items() if name.startswith("in.")}
    heads, size, value_dim = *inputs["q1"].shape[2:], inputs["v"].shape[-1]
    norm = partial(RMSNorm, epsilon=1e-5)
    options = {"head_dim": 2 * size, "value_dim": value_dim, "norm": norm, "depth": 2}
    layer = DifferentialAttention(2 * size * heads, heads, **options, key=jax.random.key(0))

    def run(inputs):
        parts = lambda layer: (layer.norm.weight, *(getattr(layer, name) for name in LAMBDAS.values()))
        filled = eqx.tree_at(parts, layer, (inputs["weight"], *(inputs[name] for name in LAMBDAS)))
        query = jnp.stack([inputs["q1"], inputs["q2"]], axis=3)
        query = pad_queries(query.reshape(*query.shape[:2], 2 * heads, size))
        key = jnp.concatenate([inputs["k1"], inputs["k2"]], axis=-1)
        options = {"group": 2, "implementation": implementation, **filled.score_options()}
        mixed, _ = attend(query, key, inputs["v"], TokenInfo(), None, **options)
        flat = mixed.reshape(*mixed.shape[:2], -1)
        return filled.finish(flat, flat).reshape(arrays["f64.o"].shape)

    output, back = jax.vjp(run, inputs)
    (gradients,) = back(jnp.asarray(arrays["weight.o"]))
    assert distance(output, arrays["f64.o"]) <= 5e-6
    largest = max(np.abs(x).max() for name, x in arrays.items() if name.startswith("f64.grad."))
    for name, gradient in gradients.items():
        wanted = arrays[f"f64.grad.{name}"]
        assert np.abs(gradient - wanted).max() <= max(1e-4 * np.abs(wanted).max(), 1e-6 * largest), name
