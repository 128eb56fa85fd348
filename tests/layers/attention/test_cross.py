"""Cross-attention: its definition, a mask of the source, its state, and refusals."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import TokenInfo
from zoo.layers.attention.cross import CrossAttention, EncodedSource, SourceKeys

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (2, 3, 16))
SOURCE = jax.random.normal(jax.random.key(2), (2, 5, 12))
MASK = jnp.array([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]], bool)


def compute(attention, x, source, mask, *, scale, soft_cap=None):
    """The formula of the class, one row and head at a time, in float64."""
    names = ("query", "key", "value", "out")
    weights = {name: np.asarray(getattr(attention, name).weight, np.float64) for name in names}
    size = attention.head_dim
    rows = []
    for row in range(len(x)):
        real = np.asarray(source[row], np.float64)[np.asarray(mask[row])]
        heads = []
        for head in range(len(weights["query"]) // size):
            own = slice(head * size, (head + 1) * size)
            shared = slice(head // attention.group * size, (head // attention.group + 1) * size)
            query = np.asarray(x[row], np.float64) @ weights["query"][own].T
            scores = scale * query @ (real @ weights["key"][shared].T).T
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            probabilities = np.exp(scores - scores.max(1, keepdims=True))
            probabilities /= probabilities.sum(1, keepdims=True)
            heads.append(probabilities @ (real @ weights["value"][shared].T))
        rows.append(np.concatenate(heads, 1) @ weights["out"].T)
    return np.stack(rows)


@pytest.mark.parametrize("scale, soft_cap", [(None, None), (1.0, 0.5)])
def test_it_is_its_definition_over_the_real_tokens(scale, soft_cap):
    options = {"kv_heads": 2, "source_embed": 12, "scale": scale, "soft_cap": soft_cap}
    attention = CrossAttention(16, 4, **options, key=KEY)
    y, keys = attention(X, TokenInfo(), attention.read(EncodedSource(SOURCE, MASK)))
    wanted = compute(attention, X, SOURCE, MASK, scale=4**-0.5 if scale is None else scale, soft_cap=soft_cap)
    np.testing.assert_allclose(y, wanted, atol=1e-5)
    assert keys.key.shape == (2, 5, 2, 4)


def test_no_mask_is_a_mask_of_ones():
    attention = CrossAttention(16, 4, source_embed=12, key=KEY)
    plain, _ = attention(X, TokenInfo(), attention.read(EncodedSource(SOURCE)))
    masked, _ = attention(X, TokenInfo(), attention.read(EncodedSource(SOURCE, jnp.ones((2, 5), bool))))
    np.testing.assert_allclose(plain, masked, atol=1e-6)


def test_padding_of_the_source_has_no_gradient():
    attention = CrossAttention(16, 4, source_embed=12, key=KEY)

    def total(source):
        return attention(X, TokenInfo(), attention.read(EncodedSource(source, MASK)))[0].sum()

    gradient = np.abs(jax.grad(total)(SOURCE)).max(-1)
    assert (gradient[~np.asarray(MASK)] == 0).all() and (gradient[np.asarray(MASK)] > 0).all()


def test_the_state_is_returned_unchanged():
    attention = CrossAttention(16, 4, source_embed=12, key=KEY)
    keys = attention.read(EncodedSource(SOURCE, MASK))
    _, after = attention(X, TokenInfo(), keys)
    assert isinstance(after, SourceKeys)
    assert all(map(np.array_equal, jax.tree.leaves(eqx.filter(keys, eqx.is_array)), jax.tree.leaves(after)))


def test_without_a_source_it_says_what_to_pass():
    attention = CrossAttention(16, 4, key=KEY)
    with pytest.raises(ValueError, match=r"was given none: state=attention\.read\(source\)"):
        attention(X, TokenInfo())
    with pytest.raises(NotImplementedError, match=r"attention\.read\(source\)"):
        attention.init_state(2, 8)
    with pytest.raises(ValueError, match="3 kv_heads"):
        CrossAttention(16, 4, kv_heads=3, key=KEY)


def test_one_key_head_serves_two_devices():
    """It is replicated, as in grouped-query attention with fewer key heads than devices."""
    attention = CrossAttention(16, 4, kv_heads=1, source_embed=12, key=KEY)
    wanted, _ = attention(X, TokenInfo(), attention.read(EncodedSource(SOURCE, MASK)))
    mesh = zoo.make_mesh(tensor=2, devices=jax.devices()[:2])

    @partial(zoo.spmd, mesh=mesh, out="batch seq embed")
    def run(attention, x, source, mask):
        attention = zoo.parallel.gather(attention)
        return attention(x, TokenInfo(), attention.read(EncodedSource(source, mask)))[0]

    np.testing.assert_allclose(run(zoo.place(attention, mesh), X, SOURCE, MASK), wanted, atol=1e-5)
