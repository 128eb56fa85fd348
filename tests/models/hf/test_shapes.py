"""Shapes of a config's model are built once, for as long as they are the same."""

import jax
import jax.numpy as jnp

from tests.models.hf.configs import small
from zoo.models.hf.config import read_config
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.shapes import build_shapes


def test_shapes_are_kept_for_equal_configs_and_dtypes():
    family = FAMILIES["llama"]
    config = read_config(family, small(family))
    model = build_shapes(family, config)
    assert build_shapes(family, read_config(family, small(family))) is model
    wider = build_shapes(family, read_config(family, small(family, vocab_size=2 * config["vocab_size"])))
    assert wider.embedding.weight.shape[0] == 2 * model.embedding.weight.shape[0]
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(model))


def test_shapes_are_float32_whatever_jax_enable_x64_is():
    family = FAMILIES["llama"]
    config = read_config(family, small(family))
    for enabled in (False, True, False):
        with jax.enable_x64(enabled):
            assert build_shapes(family, config).embedding.weight.dtype == jnp.float32
