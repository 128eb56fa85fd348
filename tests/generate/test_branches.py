"""Recurrent models with a draft: greedy tokens are plain, and states after rejected tokens are as if never read."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import RGLRU, Attention, GatedDeltaNet, Mamba2
from zoo.ops.rotary import Rotary

VOCAB = 6
SIZES = {"vocab": VOCAB, "embed": 16, "layers": 2}
ATTENTION = partial(Attention, heads=2, rotary=Rotary(8))
WINDOW = partial(ATTENTION, window=5)
MODELS = {
    "hybrid": partial(zoo.models.Hybrid, **SIZES, mlp=16, pattern=[partial(Mamba2, head_dim=16), ATTENTION]),
    "delta": partial(zoo.models.Hybrid, **SIZES, mlp=16, pattern=[partial(GatedDeltaNet, heads=2), ATTENTION]),
    "Mamba": partial(zoo.models.Mamba, **SIZES),
    "RWKV-7": partial(zoo.models.RWKV7, **SIZES, heads=2),
    "xLSTM": partial(zoo.models.XLSTM, **SIZES, heads=2),
    "Griffin": partial(zoo.models.Hybrid, **SIZES, mlp=16, pattern=[partial(RGLRU, heads=2), WINDOW]),
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_without_a_draft(name):
    """Prompts of several lengths, rows that end early, and a prefix of states after rejections, which goes on."""
    model = jax.tree.map(lambda x: 1.5 * x, MODELS[name](key=jax.random.key(0)))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (3, 9)))
    mask = jnp.arange(9) >= jnp.array([[0], [3], [8]])
    plain = np.asarray(zoo.generate(model, tokens, mask=mask, max_new_tokens=20))
    options = {"mask": mask, "max_new_tokens": 20, "stop_tokens": (int(plain[0, 9]),), "details": True}
    expected = zoo.generate(model, tokens, **options)
    found = zoo.generate(model, tokens, **options, draft="prompt", draft_tokens=4)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert found.steps <= expected.steps
    after = [zoo.generate(model, tokens[:, :2], prefix=x.prefix, max_new_tokens=4) for x in (expected, found)]
    np.testing.assert_array_equal(*after)
