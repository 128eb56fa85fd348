"""A model with some of the layers of another."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers import Attention
from zoo.models import keep_layers, swap_stack
from zoo.models.decoder import UnrolledStack

KEY = jax.random.key(0)
FIXTURES = Path(__file__).parents[1] / "fixtures" / "models"


@pytest.mark.one_case
@pytest.mark.parametrize("layers", [[0, 2, 4], [5, 0]])
def test_kept_layers_are_layers_of_the_model(layers):
    """Of two kinds, in any order."""
    attend = partial(Attention, heads=2)
    pattern = [partial(Attention, heads=2, window=2), attend, attend]
    model = zoo.models.Hybrid(vocab=32, embed=16, layers=6, pattern=pattern, mlp=16, key=KEY)
    blocks = list(model.stack.iter_blocks())
    plain = swap_stack(model, lambda stack: UnrolledStack(tuple(blocks[layer] for layer in layers)))
    kept = keep_layers(model, layers)
    assert kept.stack.count_layers() == len(layers)
    tokens = jnp.arange(16).reshape(2, 8)
    np.testing.assert_allclose(kept(tokens), plain(tokens), rtol=1e-5, atol=1e-5)


def test_layers_that_cannot_be_kept_are_refused():
    model = zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=16, key=KEY)
    with pytest.raises(ValueError, match="there is no layer 2: the model has layers 0 to 1"):
        keep_layers(model, [0, 2])
    with pytest.raises(ValueError, match="at least one layer"):
        keep_layers(model, [])
    with pytest.raises(TypeError, match="not with UnrolledStack"):
        keep_layers(swap_stack(model, lambda stack: stack.unstack()), [0])
    config = json.loads((FIXTURES / "zamba2" / "config.json").read_text())
    assert config["num_mem_blocks"], "blocks of a Zamba 2 share their attention"
    with pytest.raises(NotImplementedError, match="depend on one another"):
        keep_layers(zoo.load(FIXTURES / "zamba2"), [0])
