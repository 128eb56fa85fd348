"""Weights and sums of hyper-connections: float64 reference values with gradients, and doubly stochastic matrices."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tests.parity_ops import distance
from zoo.ops.hyper_connections import make_stream_weights, read_streams, sinkhorn, write_streams
from zoo.ops.normalization import rms_norm

MORE = os.environ.get("ZOO_PARITY")


@jax.jit
def run(inputs):
    """Run a layer that is tanh, and return the streams and the mixture."""
    x = inputs["x"]
    logits = rms_norm(x.reshape(*x.shape[:-2], -1), epsilon=1e-6) @ inputs["fn"].T
    weights = make_stream_weights(logits, inputs["scale"], inputs["base"])
    return write_streams(x, jnp.tanh(read_streams(x, weights.pre)), weights), weights.comb


@pytest.mark.skipif(not MORE, reason="ZOO_PARITY names no folder of reference cases")
@pytest.mark.parametrize("variant", ["base", "even", "one"])
def test_values_and_gradients_equal_reference_values(variant):
    arrays = load_file(Path(str(MORE)) / "ops_more" / f"hyper_connections.{variant}.safetensors")
    part = lambda prefix: {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}
    weights = part("weight.")
    (output, comb), back = jax.vjp(run, {name: jnp.asarray(x) for name, x in part("in.").items()})
    assert distance(output, arrays["f64.o"]) < 1e-6
    assert distance(comb, arrays["f64.state"]) < 1e-6
    (gradients,) = back((jnp.asarray(weights["o"]), jnp.asarray(weights["state"])))
    wanted = part("f64.grad.")
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert distance(gradient, wanted[name]) < 2e-6, name


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_streams_equal_the_formula(dtype):
    """Stream by stream. The dtype is that of the streams; weights are of float32."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((2, 3, 4, 6), (2, 3, 6)))
    logits = jnp.asarray(rng.normal(size=(2, 3, 24)), dtype)
    scale, base = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in (3, 24))
    weights = make_stream_weights(logits, scale, base)
    u, new = read_streams(x, weights.pre), write_streams(x, y, weights)
    assert u.dtype == new.dtype == dtype and {weight.dtype for weight in weights} == {jnp.dtype(jnp.float32)}

    x, y, logits, scale, base = (np.asarray(a, np.float64) for a in (x, y, logits, scale, base))
    sigmoid = lambda a: 1 / (1 + np.exp(-a))
    pre = sigmoid(scale[0] * logits[..., :4] + base[:4]) + 1e-6
    post = 2 * sigmoid(scale[1] * logits[..., 4:8] + base[4:8])
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(weights.pre, pre, rtol=1e-5)
    np.testing.assert_allclose(weights.post, post, rtol=1e-5)
    comb = np.asarray(weights.comb, np.float64)
    read = sum(pre[..., i, None] * x[..., i, :] for i in range(4))
    np.testing.assert_allclose(np.asarray(u, np.float64), read, rtol=tolerance, atol=tolerance)
    for j in range(4):
        stream = sum(comb[..., i, j, None] * x[..., i, :] for i in range(4)) + post[..., j, None] * y
        np.testing.assert_allclose(np.asarray(new[..., j, :], np.float64), stream, rtol=tolerance, atol=tolerance)


@jax.jit
def normalize(logits):
    return sinkhorn(logits, iterations=40)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.floats(0, 3))
def test_a_mixture_is_doubly_stochastic(seed, size):
    """So it keeps the sum of the streams, and no stream grows."""
    logits = size * np.random.default_rng(seed).normal(size=(16, 4, 4)).astype(np.float32)
    matrix = np.asarray(normalize(logits))
    assert (matrix >= 0).all()
    np.testing.assert_allclose(matrix.sum(-2), 1, atol=1e-5)  # divided last
    np.testing.assert_allclose(matrix.sum(-1), 1, atol=5e-2)
    assert np.median(np.abs(matrix.sum(-1) - 1)) < 1e-3


def test_extreme_logits_have_finite_gradients():
    logits = jnp.asarray([[0.0, -1e4, 1e4], [1e4, 0.0, -1e4], [-1e4, 1e4, 0.0]])
    weigh = jnp.arange(9.0).reshape(3, 3)
    value, gradient = jax.value_and_grad(lambda x: (sinkhorn(x) * weigh).sum())(logits)
    assert np.isfinite(value) and np.isfinite(gradient).all()
    np.testing.assert_allclose(sinkhorn(logits), [[0, 0, 1], [1, 0, 0], [0, 1, 0]], atol=1e-5)


def test_the_backward_pass_saves_the_logits_only():
    logits = jnp.zeros((5, 4, 4))
    _, back = jax.vjp(sinkhorn, logits)
    saved = [x.shape for x in jax.tree.leaves(back) if getattr(x, "ndim", 0)]
    assert saved == [logits.shape]
