"""Ratios of updates to parameters, by group."""

import equinox as eqx
import jax
import pytest

import zoo
from zoo.train.health import measure_updates


def test_update_ratios_by_group():
    model = zoo.models.Transformer(vocab=16, embed=8, layers=2, heads=2, mlp=16, key=jax.random.key(0))
    updates = jax.tree.map(lambda x: 0.01 * x, zoo.trainable(model))
    ratios = jax.jit(measure_updates)(zoo.trainable(model), updates)
    groups = {"embedding", "mixer_norm", "attention", "ffn_norm", "gated_mlp", "norm"}
    assert set(ratios) == {f"update_ratio_{group}" for group in groups}
    for ratio in ratios.values():
        assert float(ratio) == pytest.approx(0.01, rel=1e-5)
    doubled = jax.tree.map(lambda x: 2 * x, updates.stack)
    ratios = measure_updates(zoo.trainable(model), eqx.tree_at(lambda m: m.stack, updates, doubled))
    assert float(ratios["update_ratio_attention"]) == pytest.approx(0.02, rel=1e-5)
    assert float(ratios["update_ratio_embedding"]) == pytest.approx(0.01, rel=1e-5)
