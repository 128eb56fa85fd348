"""Mamba of one head is Mamba, heads do not read one another, and an updated matrix is the sum."""

from functools import partial
from operator import attrgetter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.layers.random_layers import activations, randomize, relative_error
from zoo.layers import Linear, Mamba, TokenInfo
from zoo.models.hf.families.zamba_layers import MultiHeadMamba, UpdatedLinear

EMBED, HEAD_DIM, SEQ = 8, 6, 7


def make(heads):
    return randomize(partial(MultiHeadMamba, EMBED, heads, HEAD_DIM, state_dim=3, rank=2))


@pytest.mark.parametrize("cached", [False, True])
def test_one_head_is_mamba(cached):
    layer = make(1)
    head = jax.tree.map(lambda x: x[0], layer.heads)
    plain = Mamba(EMBED, inner=HEAD_DIM, state_dim=3, rank=2, key=jax.random.key(0))
    names = ("gate", "x", "convolution", "out"), ("dt_down", "B", "C", "dt_up", "dt_bias", "A_log", "D")
    for module, fields in zip((layer, head), names, strict=True):
        for name in fields:
            plain = eqx.tree_at(attrgetter(name), plain, getattr(module, name))
    x = activations(2, SEQ, EMBED)
    info = TokenInfo(positions=jnp.broadcast_to(jnp.arange(SEQ), (2, SEQ)) if cached else None)
    states = [mixer.init_state(2, SEQ) if cached else None for mixer in (layer, plain)]
    (ours, state), (wanted, plain_state) = (
        mixer(x, info, state) for mixer, state in zip((layer, plain), states, strict=True)
    )
    assert relative_error(ours, wanted) < 1e-6
    if cached:
        assert relative_error(state.ssm_state[:, 0], plain_state.ssm_state) < 1e-6
    else:
        assert state is None is plain_state


def test_heads_do_not_read_one_another():
    """Up to the last projection."""
    layer = make(3)
    changed = eqx.tree_at(lambda layer: layer.heads.B.weight, layer, layer.heads.B.weight.at[1].add(1.0))
    x = activations(2, SEQ, EMBED)
    name = "out.input"
    whole, other = (zoo.capture(each, name)(x, TokenInfo())[1][name] for each in (layer, changed))
    heads = jnp.abs(whole - other).reshape(2, SEQ, 3, HEAD_DIM).max((0, 1, 3))
    assert heads[1] > 1e-3 and heads[0] == heads[2] == 0


def test_an_updated_matrix_is_the_sum():
    keys = jax.random.split(jax.random.key(0), 3)
    base, down, up = (Linear(*sizes, key=key) for sizes, key in zip([(8, 5), (8, 2), (2, 5)], keys, strict=True))
    updated = UpdatedLinear(base, down, up)
    weight = base.weight + up.weight @ down.weight
    x, y = activations(2, 3, 8), activations(2, 3, 5)
    assert updated.out_size == 5
    np.testing.assert_allclose(updated(x), x @ weight.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(updated.transposed(y), y @ weight, rtol=1e-5, atol=1e-6)
