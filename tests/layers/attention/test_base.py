"""A variant of grouped attention that defines its projections gets call and KV cache from the base class."""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
import pytest

from tests.layers.random_layers import activations, randomize, relative_error
from zoo.layers import AbstractLinear, TokenInfo
from zoo.layers.attention.base import AbstractGroupedAttention, make_projections, rotate
from zoo.layers.heads import split_heads
from zoo.ops.attention import ATTENTION, AttentionMask, reference_attention
from zoo.ops.rotary import Rotary
from zoo.parallel import implementation_option

SEQ, WINDOW = 7, 4


class DoubledAttention(AbstractGroupedAttention):
    """Attention with soft-capped scores, values of another size than keys, and doubled heads."""

    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    out: AbstractLinear

    head_dim: int = eqx.field(static=True)
    group: int = eqx.field(static=True)
    rotary: Rotary | None = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    implementation: str | Callable = implementation_option(ATTENTION)

    def __init__(self, *, key):
        self.query, self.key, self.value, self.out = make_projections(16, 4, 2, 6, value_dim=3, key=key)
        self.head_dim = 6
        self.group = 2
        self.rotary = Rotary(4)
        self.window = WINDOW
        self.implementation = "auto"

    def project(self, x, info, state):
        query = split_heads(self.query(x), self.head_dim)
        key = split_heads(self.key(x), self.head_dim)
        query, key = rotate(query, key, self.rotary, x, info, state)
        return query, key, split_heads(self.value(x), 3)

    def score_options(self):
        return {"soft_cap": 3.0}

    def finish(self, mixed, x):
        return 2 * mixed


class UnfinishedAttention(AbstractGroupedAttention):
    pass


@eqx.filter_jit
def run_all(layer, x):
    state = layer.init_state(2, SEQ)
    assert (state.key.shape, state.value.shape) == ((2, 2, WINDOW, 6), (2, 2, WINDOW, 3))
    positions = jnp.broadcast_to(jnp.arange(SEQ), (2, SEQ))
    outputs = []
    for start, stop in ((0, 4), (4, 5), (5, SEQ)):
        output, state = layer(x[:, start:stop], TokenInfo(positions[:, start:stop]), state)
        outputs.append(output)
    mask = AttentionMask(True, WINDOW)
    mixed = reference_attention(*layer.project(x, TokenInfo(), None), mask, soft_cap=3.0)
    expected = layer.out(2 * mixed.reshape(2, SEQ, -1))
    return layer(x, TokenInfo())[0], expected, jnp.concatenate(outputs, 1)


def test_variant_of_grouped_attention_equals_formula_and_cache():
    ours, expected, cached = run_all(randomize(DoubledAttention), activations(2, SEQ, 16))
    assert relative_error(ours, expected) < 1e-5
    assert relative_error(cached, expected) < 1e-5
    with pytest.raises(TypeError, match="abstract"):
        UnfinishedAttention()
