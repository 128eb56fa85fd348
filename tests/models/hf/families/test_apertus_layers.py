"""xIELU equals its formula, on one device and with its channels sharded, and trains its two numbers."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.models.hf.families.apertus_layers import Xielu, XieluMLP


def compute_formula(x, alpha_p, alpha_n, beta=0.5, eps=-1e-6):
    softplus = lambda value: np.log1p(np.exp(value))
    below = (beta + softplus(alpha_n)) * (np.expm1(np.minimum(x, eps)) - x) + beta * x
    return np.where(x > 0, softplus(alpha_p) * x**2 + beta * x, below)


def test_xielu_equals_its_formula():
    xielu, x = Xielu(), np.linspace(-4, 4, 33)
    expected = compute_formula(x, np.float64(xielu.alpha_p), np.float64(xielu.alpha_n))
    assert np.allclose(xielu(jnp.asarray(x)), expected, atol=1e-5)
    assert np.allclose(expected[-1], 0.8 * 16 + 0.5 * 4) and np.allclose(expected[0], 0.8 * (np.expm1(-4) + 4) - 2)
    assert xielu(jnp.ones(3, jnp.bfloat16)).dtype == jnp.bfloat16
    assert zoo.count(xielu) == 2 and zoo.cast(xielu, jnp.bfloat16).alpha_p.dtype == jnp.float32
    for wrong in ({"positive": 0.0}, {"negative": 0.5}, {"eps": 0.0}):
        with pytest.raises(ValueError, match="xIELU has positive > 0"):
            Xielu(**wrong)


def test_xielu_mlp_on_a_mesh_equals_one_device():
    mesh, mlp = zoo.make_mesh(data=4, tensor=2), XieluMLP(8, 16, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 3, 8))

    def loss_fn(mlp, batch):
        return (mlp(batch["x"])[0] ** 2).sum(), jnp.float32(batch["x"].shape[0])

    def run_serial(mlp):
        total, count = loss_fn(mlp, {"x": x})
        return total / count

    loss, gradient = zoo.value_and_grad(loss_fn, mesh)(zoo.place(mlp, mesh), {"x": x})
    expected, wanted = eqx.filter_jit(eqx.filter_value_and_grad(run_serial))(mlp)
    assert jnp.allclose(loss, expected, rtol=1e-5)
    for ours, theirs in zip(
        jax.tree.leaves((gradient.up, gradient.xielu.alpha_p, gradient.xielu.alpha_n)),
        jax.tree.leaves((wanted.up, wanted.xielu.alpha_p, wanted.xielu.alpha_n)),
        strict=True,
    ):
        assert jnp.allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert gradient.xielu.beta is None and gradient.xielu.eps is None, "buffers are not trained"
