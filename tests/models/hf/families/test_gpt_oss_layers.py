"""The clamped SwiGLU equals its formula."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from zoo.models.hf.families.gpt_oss_layers import ClampedGatedMLP

KEY = jax.random.key(0)


def test_clamped_gated_mlp_equals_its_formula():
    layer, x = ClampedGatedMLP(8, 6, alpha=1.5, limit=0.5, key=KEY), jax.random.normal(KEY, (2, 3, 8))
    layer = eqx.tree_at(lambda layer: layer.gate.bias, layer, jnp.linspace(-0.5, 0.5, 6))
    gate, up = jnp.minimum(layer.gate(x), 0.5), jnp.clip(layer.up(x), -0.5, 0.5)
    assert jnp.allclose(layer(x)[0], layer.down((up + 1) * gate * jax.nn.sigmoid(1.5 * gate)), atol=1e-6)
    with pytest.raises(ValueError, match="a limit above 0, not to 0"):
        ClampedGatedMLP(8, 6, limit=0, key=KEY)
