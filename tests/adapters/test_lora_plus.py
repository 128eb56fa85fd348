"""LoRA+: B gets a larger learning rate than A."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zoo
from zoo import adapters
from zoo.models.parameter_paths import list_parameter_paths

KEY = jax.random.key(0)


def test_lora_plus_labels_b():
    """The projection `up` has adapters, whose B is called `up`, too."""
    layer = zoo.layers.GatedMLP(4, 6, key=KEY)
    wrapped = zoo.trainable(adapters.lora(layer, targets=("gate", "up"), rank=2, key=KEY))
    labels = zip(list_parameter_paths(wrapped), jax.tree.leaves(adapters.lora_plus(wrapped)), strict=True)
    found = {path.name: label for path, label in labels}
    of_each = {"lora.down.weight": "rest", "lora.up.weight": "B"}
    assert found == {f"{name}.{part}": label for name in ("gate", "up") for part, label in of_each.items()}


@pytest.mark.ci
def test_lora_plus_scales_the_learning_rate_of_b():
    """Adam's first step has the length of the learning rate: sixteen times A's."""
    model = zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=24, tied=False, key=KEY)
    wrapped = adapters.lora(model, targets=("query", "embedding"), modules_to_save=("norm",), rank=2, key=KEY)
    labels = adapters.lora_plus(wrapped)
    assert jax.tree.leaves(labels).count("B") == 2
    optimizer = optax.partition({"rest": optax.adam(1e-3), "B": optax.adam(16e-3)}, adapters.lora_plus)
    trainable = zoo.trainable(wrapped)
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, trainable), optimizer.init(trainable), trainable)
    for path, step in zip(list_parameter_paths(updates), jax.tree.leaves(updates), strict=True):
        expected = 16e-3 if path.name.endswith("lora.up.weight") else 1e-3
        np.testing.assert_allclose(step, -expected, rtol=1e-4)
    with pytest.raises(ValueError, match="no trainable LoRA"):
        adapters.lora_plus(adapters.unfreeze(model, "norm"))
