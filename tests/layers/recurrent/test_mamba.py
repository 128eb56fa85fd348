"""Mamba and Mamba-2 equal their formulas, on one device and on a mesh. Tests of all mixers are in test_mixers.py."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from tests.layers.recurrent.checks import check_mesh_equals_one_device, decode, forward
from zoo.layers import Mamba, Mamba2, RMSNorm

KEY = jax.random.key(0)
EMBED, SEQ = 16, 7
LAYERS = {
    "mamba": partial(Mamba, state_dim=3, bias=True),
    "mamba with norms": partial(Mamba, inner=24, state_dim=3, rank=2, norm=partial(RMSNorm, scaled=False)),
    "mamba2": partial(Mamba2, head_dim=8, groups=2, state_dim=3, bias=True),
    "mamba2 with dt_limit": partial(
        Mamba2, head_dim=4, state_dim=5, conv_width=2, dt_limit=(0.05, 0.5), norm_before_gate=True
    ),
}


def make_layer(name, **options):
    return randomize(partial(LAYERS[name], EMBED, **options), power=-0.25)


def convolve(convolution, x):
    width = convolution.weight.shape[1]
    padded = jnp.pad(x, [(0, 0), (width - 1, 0), (0, 0)])
    return jax.nn.silu(
        sum(convolution.weight[:, k] * padded[:, k : k + x.shape[1]] for k in range(width)) + convolution.bias
    )


def naive_mamba(layer, x):
    """Compute the formulas of the docstring, one token at a time."""
    silu, softplus = jax.nn.silu, jax.nn.softplus
    u = convolve(layer.convolution, layer.x(x))
    apply_norm = lambda y, norm: y if norm is None else y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-6)
    dt = softplus(layer.dt_up(apply_norm(layer.dt_down(u), layer.dt_norm)) + layer.dt_bias)
    B, C = apply_norm(layer.B(u), layer.B_norm), apply_norm(layer.C(u), layer.C_norm)
    A, h, out = -jnp.exp(layer.A_log), jnp.zeros((len(x), *layer.A_log.shape)), []
    for t in range(x.shape[1]):
        h = jnp.exp(dt[:, t, :, None] * A) * h + (dt * u)[:, t, :, None] * B[:, t, None]
        out.append((h * C[:, t, None]).sum(-1) + layer.D * u[:, t])
    return layer.out(jnp.stack(out, 1) * silu(layer.gate(x)))


def naive_mamba2(layer, x):
    """Compute the formulas of the docstring, one token at a time."""
    split = lambda y, size: y.reshape(*y.shape[:2], -1, size)
    u = split(convolve(layer.x_convolution, layer.x(x)), layer.head_dim)
    groups = layer.B.out_size // layer.state_dim
    B, C = (
        jnp.repeat(split(convolve(convolution, linear(x)), layer.state_dim), u.shape[2] // groups, axis=2)
        for convolution, linear in ((layer.B_convolution, layer.B), (layer.C_convolution, layer.C))
    )
    dt = jnp.clip(jax.nn.softplus(layer.dt(x) + layer.dt_bias), *layer.dt_limit)
    A, h, out = -jnp.exp(layer.A_log), jnp.zeros((len(x), *u.shape[2:], layer.state_dim)), []
    for t in range(x.shape[1]):
        h = jnp.exp(dt[:, t] * A)[..., None, None] * h
        h = h + dt[:, t, :, None, None] * u[:, t, :, :, None] * B[:, t, :, None]
        out.append((h * C[:, t, :, None]).sum(-1) + layer.D[:, None] * u[:, t])
    y, gate = jnp.stack(out, 1).reshape(*x.shape[:2], -1), jax.nn.silu(layer.gate(x))
    norm_before_gate = layer.norm.norm_before_gate
    y = split(y if norm_before_gate else y * gate, y.shape[-1] // groups)
    y = (y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-5)).reshape(gate.shape) * layer.norm.weight
    return layer.out(y * gate if norm_before_gate else y)


NAIVE = {Mamba: naive_mamba, Mamba2: naive_mamba2}


@pytest.mark.one_case
@pytest.mark.parametrize("name", LAYERS)
def test_mamba_equals_its_formula_in_both_modes(name):
    layer, x = make_layer(name), activations(2, SEQ, EMBED)
    expected = eqx.filter_jit(NAIVE[type(layer)])(layer, x)
    assert relative_error(forward(layer, x), expected) < 1e-5
    assert relative_error(forward(make_layer(name, implementation="recurrent"), x), expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tensor"),
    [("mamba with norms", 2), ("mamba2", 4), ("mamba2 with dt_limit", 4)],
)
def test_mamba_on_a_mesh_equals_one_device(name, tensor):
    """With fewer groups than devices along `tensor`: two and one. As many are in test_mixers.py."""
    mesh = zoo.make_mesh(data=4 // tensor, fsdp=2, tensor=tensor)
    check_mesh_equals_one_device(make_layer(name), activations(4, SEQ, EMBED), mesh)


@pytest.mark.parametrize("name", [pytest.param("mamba", marks=pytest.mark.slow), "mamba2"])
def test_mamba_in_bfloat16_keeps_a_float32_state(name):
    layer, x = zoo.cast(make_layer(name), jnp.bfloat16), activations(2, SEQ, EMBED)
    positions = jnp.arange(SEQ)[None].repeat(2, 0)
    y, state = decode(layer, layer.init_state(2, SEQ, jnp.bfloat16), x.astype(jnp.bfloat16), positions)
    assert y.dtype == jnp.bfloat16
    assert relative_error(y.astype(jnp.float32), forward(make_layer(name), x)) < 0.1
    assert {str(x.dtype) for x in jax.tree.leaves(state)} == {"float32", "bfloat16"}
    assert layer.A_log.dtype == jnp.float32


def test_mamba_initialization_is_that_of_the_papers():
    mamba, mamba2 = eqx.filter_jit(lambda key: (Mamba(EMBED, inner=512, key=key), Mamba2(256, key=key)))(KEY)
    for layer in (mamba, mamba2):
        dt = np.logaddexp(layer.dt_bias, 0)
        assert 0.00099 < dt.min() < 0.01 < dt.max() < 0.101
        assert (np.asarray(layer.D) == 1).all()
    assert np.allclose(np.exp(mamba.A_log), np.arange(1.0, 17.0))
    assert ((np.exp(mamba2.A_log) >= 1) & (np.exp(mamba2.A_log) <= 16)).all()
    assert (mamba2.dt.out_size, mamba2.out.out_size, mamba.dt_down.out_size) == (8, 256, 1)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (partial(Mamba, state_dim=0), "state_dim is 0, and a size is at least 1"),
        (partial(Mamba2, head_dim=7), "expand \\* embed = 32 does not divide evenly over heads 7 wide"),
        (partial(Mamba2, heads=4, groups=3), "4 heads do not divide evenly over 3 groups"),
        (partial(Mamba2, head_dim=8, state_dim=0), "state_dim is 0, and a size is at least 1"),
        (partial(Mamba2, head_dim=8, dt_limit=(0.1, 0.1)), "the second limit is the larger"),
    ],
)
def test_mamba_rejects_impossible_sizes(factory, message):
    with pytest.raises(ValueError, match=message):
        factory(EMBED, key=KEY)
