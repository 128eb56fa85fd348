"""Mamba-3 equals its formula of one and of several inputs and outputs. Tests of all mixers are in test_mixers.py."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from tests.layers.recurrent.checks import check_mesh_equals_one_device, decode, forward
from zoo.layers import Mamba3

KEY = jax.random.key(0)
EMBED, SEQ = 16, 7
LAYERS = {
    "one": partial(Mamba3, head_dim=8, groups=2, state_dim=5),
    "several": partial(Mamba3, head_dim=4, state_dim=4, angles=2, rank=3, norm=True),
}


def make_layer(name, **options):
    return randomize(partial(LAYERS[name], EMBED, **options), power=-0.25)


def naive_mamba3(layer, u):
    """Compute the formulas of the docstring, one token and one head at a time, with complex numbers for pairs."""
    heads, rank, state_dim = layer.B_bias.shape
    sigmoid, silu = jax.nn.sigmoid, jax.nn.silu
    pairs = layer.angle.out_size
    rms = lambda y: y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-5)
    ones = jnp.ones((heads, rank, layer.head_dim))
    mimo_x, mimo_gate, mimo_out = (ones if y is None else y for y in (layer.mimo_x, layer.mimo_gate, layer.mimo_out))

    def turn(y, angle):
        turned = (y[..., 0 : 2 * pairs : 2] + 1j * y[..., 1 : 2 * pairs : 2]) * jnp.exp(1j * angle)
        return jnp.concatenate([turned.real, turned.imag, y[..., 2 * pairs :]], -1)  # permuted, B as C

    def run_head(u, h):
        split = lambda y: y.reshape(len(u), -1, layer.head_dim)[:, h, None]
        groups = [linear(u).reshape(len(u), -1, rank, state_dim) for linear in (layer.B, layer.C)]
        B, C = (
            norm.weight * rms(y[:, h // layer.group]) + bias[h]
            for y, norm, bias in zip(groups, (layer.B_norm, layer.C_norm), (layer.B_bias, layer.C_bias), strict=True)
        )
        a = layer.A(u)[:, h]
        A = -jnp.maximum(jnp.where(a >= 0, 1 + a, 1 / (1 - a)), 1e-4)
        dt = jnp.logaddexp(layer.dt(u)[:, h] + layer.dt_bias[h], 0)
        trapezoid = sigmoid(layer.trapezoid(u)[:, h])
        angle = jnp.cumsum(jnp.pi * jnp.tanh(layer.angle(u)) * dt[:, None], axis=0)[:, None]
        x, gate = split(layer.x(u)) * mimo_x[h], silu(split(layer.gate(u)) * mimo_gate[h])
        B, C = turn(B, angle), turn(C, angle)
        S, before, outputs = jnp.zeros((state_dim, layer.head_dim)), 0.0, []
        for t in range(len(u)):
            S = jnp.exp(dt[t] * A[t]) * (S + (1 - trapezoid[t]) * dt[t] * before) + trapezoid[t] * dt[t] * B[t].T @ x[t]
            before = B[t].T @ x[t]
            o = C[t] @ S + layer.D[h] * x[t]
            if layer.norm is not None:
                o = layer.norm.weight.reshape(heads, -1)[h] * rms(o)
            outputs.append((mimo_out[h] * gate[t] * o).sum(0))
        return jnp.stack(outputs)

    rows = [jnp.concatenate([run_head(row, h) for h in range(heads)], axis=1) for row in u]
    return layer.out(jnp.stack(rows))


@pytest.mark.one_case
@pytest.mark.parametrize("name", LAYERS)
def test_mamba3_equals_its_formula_in_both_modes(name):
    layer, x = make_layer(name), activations(2, SEQ, EMBED)
    expected = eqx.filter_jit(naive_mamba3)(layer, x)
    assert relative_error(forward(layer, x), expected) < 1e-5
    assert relative_error(forward(make_layer(name, implementation="recurrent"), x), expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_mamba3_on_a_mesh_equals_one_device(name):
    """With fewer groups than devices along `tensor`. As many are in test_mixers.py."""
    check_mesh_equals_one_device(make_layer(name), activations(4, SEQ, EMBED), zoo.make_mesh(fsdp=2, tensor=4))


@pytest.mark.ci
def test_mamba3_in_bfloat16_keeps_a_float32_state():
    layer, x = zoo.cast(make_layer("several"), jnp.bfloat16), activations(2, SEQ, EMBED)
    positions = jnp.arange(SEQ)[None].repeat(2, 0)
    y, state = decode(layer, layer.init_state(2, SEQ, jnp.bfloat16), x.astype(jnp.bfloat16), positions)
    assert y.dtype == jnp.bfloat16
    assert relative_error(y.astype(jnp.float32), forward(make_layer("several"), x)) < 0.1
    assert {str(x.dtype) for x in jax.tree.leaves(state)} == {"float32"}
    assert layer.B_bias.dtype == layer.mimo_x.dtype == jnp.float32


def test_mamba3_of_several_inputs_begins_as_a_mean_of_them():
    """The vectors of MIMO are 1 or 1 / rank, and only B and C have more parameters."""
    one, several = (eqx.filter_eval_shape(partial(Mamba3, 128, rank=rank), key=KEY) for rank in (1, 4))
    assert (one.D.shape, one.angle.out_size, one.B_bias.shape) == ((4,), 32, (4, 1, 128))
    vectors = {"mimo_x", "mimo_gate", "mimo_out"}
    assert all(getattr(one, name) is None and getattr(several, name).shape == (4, 4, 64) for name in vectors)
    layer = LAYERS["several"](EMBED, key=KEY)
    assert np.allclose(layer.mimo_x, 1 / 3) and np.allclose(layer.mimo_out, 1 / 3) and (layer.mimo_gate == 1).all()
    dt = np.logaddexp(layer.dt_bias, 0)
    assert 0.00099 < dt.min() < dt.max() < 0.101 and (layer.C_bias == 1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 7}, "expand \\* embed = 32 does not divide evenly over heads 7 wide"),
        ({"heads": 4, "groups": 3}, "4 heads do not divide evenly over 3 groups"),
        ({"head_dim": 8, "rank": 0}, "rank is 0, and a size is at least 1"),
        ({"head_dim": 8, "state_dim": 5, "angles": 3}, "3 angles turn pairs of states, and state_dim=5 has 2"),
        ({"head_dim": 8, "state_dim": 1}, "1 angles turn pairs of states, and state_dim=1 has 0"),
    ],
)
def test_mamba3_rejects_impossible_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        Mamba3(EMBED, **options, key=KEY)
