"""Dropout: keys, sites and rows."""

import jax
import jax.numpy as jnp
import numpy as np

from zoo.layers import Dropout, TokenInfo

KEY = jax.random.key(0)


def test_dropout_mask_depends_on_key_site_and_row_only():
    dropout, x = Dropout(0.5), jnp.ones((2, 8, 16))
    info = TokenInfo(keys=jax.random.split(KEY, 2))
    assert dropout(x, TokenInfo(), site=0) is x
    assert set(np.unique(dropout(x, info, site=0))) == {0.0, 2.0}
    assert not jnp.array_equal(dropout(x, info, site=0), dropout(x, info, site=1))
    assert not jnp.array_equal(dropout(x, info, site=0), dropout(x, info.fold_keys(3), site=0))
    second_row = dropout(x[1:], TokenInfo(keys=info.keys[1:]), site=0)
    assert jnp.array_equal(dropout(x, info, site=0)[1:], second_row)
