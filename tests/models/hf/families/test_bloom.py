"""BLOOM with residuals from before and after its norms, by its equations."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.layers import TokenInfo
from zoo.models.hf.config import read_config
from zoo.models.hf.families import FAMILIES


@pytest.mark.parametrize("after_norm", [False, True])
def test_residuals_come_from_before_or_after_the_norms(after_norm):
    family = FAMILIES["bloom"]
    given = {"vocab_size": 32, "hidden_size": 16, "n_layer": 2, "n_head": 4}
    config = read_config(family, given | {"apply_residual_connection_post_layernorm": after_norm})
    model = family.build(config, key=jax.random.key(0))
    model = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(1), x.shape), model)
    tokens = jnp.arange(10).reshape(2, 5)

    @eqx.filter_jit
    def compute(model, tokens):
        x = model.embedding_norm(model.embedding(tokens))
        for block in model.stack.iter_blocks():
            normed = block.mixer_norm(x)
            x = (normed if after_norm else x) + block.mixer(normed, TokenInfo())[0]
            normed = block.ffn_norm(x)
            x = (normed if after_norm else x) + block.ffn(normed)[0]
        return model.embedding.transposed(model.norm(x))

    np.testing.assert_allclose(eqx.filter_jit(model)(tokens), compute(model, tokens), rtol=2e-5, atol=2e-5)
