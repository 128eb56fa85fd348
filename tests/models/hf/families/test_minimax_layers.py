"""MiniMax's residual wiring against its formula, and slopes by the number of the layer."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tests.models.hf.configs import small
from zoo.layers import Dropout, GatedMLP, Lightning, RMSNorm, TokenInfo
from zoo.models import Hidden
from zoo.models.hf.config import read_config
from zoo.models.hf.families.minimax import MINIMAX
from zoo.models.hf.families.minimax_layers import NormedResidualBlock
from zoo.ops.recurrence.linear_attention import lightning_slopes

KEY = jax.random.key(0)


def test_residuals_start_after_the_norms():
    norms = {"mixer_norm": RMSNorm(8, epsilon=0.1), "ffn_norm": RMSNorm(8, epsilon=0.2)}
    mixer, ffn = Lightning(8, 2, depth=0.5, key=KEY), GatedMLP(8, 12, key=KEY)
    make = partial(NormedResidualBlock, mixer_factors=(1.2, 0.9), ffn_factors=(1.1, 0.7))
    block = make(mixer=mixer, ffn=ffn, dropout=Dropout(0.0), **norms)
    x = jax.random.normal(KEY, (2, 5, 8))
    hidden, state = block(Hidden(x), TokenInfo())
    normed = norms["mixer_norm"](x)
    normed = norms["ffn_norm"](1.2 * normed + 0.9 * mixer(normed, TokenInfo())[0])
    np.testing.assert_allclose(hidden.x, 1.1 * normed + 0.7 * ffn(normed)[0], rtol=1e-5, atol=1e-6)
    assert state is None


def test_slopes_of_a_new_model_follow_from_numbers_of_layers():
    """Layers 1, 2 and 4 of 5, of which two are scanned together."""
    kinds = ["full_attention", *["linear_attention"] * 2, "full_attention", "linear_attention"]
    given = {**small(MINIMAX), "num_hidden_layers": 5, "layer_types": kinds}
    model = MINIMAX.build(read_config(MINIMAX, given), key=KEY)
    mixers = [block.mixer for block in model.stack.iter_blocks()]
    for number in (1, 2, 4):
        wanted = lightning_slopes(len(mixers[number].slopes), number / 4)
        np.testing.assert_allclose(mixers[number].slopes, wanted, atol=2e-5)
        assert mixers[number].slopes.min() > 0  # the last layer decays, too


def test_given_slopes_are_those_of_a_depth():
    x = jax.random.normal(KEY, (2, 9, 8))
    by_depth = Lightning(8, 2, depth=0.5, key=KEY)
    given = Lightning(8, 2, slopes=lightning_slopes(2, 0.5), key=KEY)
    np.testing.assert_array_equal(given(x, TokenInfo())[0], by_depth(x, TokenInfo())[0])
    assert not np.array_equal(given(x, TokenInfo())[0], Lightning(8, 2, slopes=jnp.ones(2), key=KEY)(x, TokenInfo())[0])
