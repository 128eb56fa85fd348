"""Properties of all methods for random sizes, ranks, target modules and dtypes."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo
from tests.quick import mark_slow
from zoo import adapters
from zoo.layers import GatedMLP
from zoo.models.parameter_paths import list_parameter_paths

METHODS = {
    "lora": lambda rank: partial(adapters.lora, rank=rank, rank_pattern={"up": 1}),
    "pissa": lambda rank: partial(adapters.lora, rank=rank, init="pissa"),
    "olora": lambda rank: partial(adapters.lora, rank=rank, init="olora"),
    "rslora": lambda rank: partial(adapters.lora, rank=rank, alpha=3, rank_stabilized=True, init="gaussian"),
    "dora": lambda rank: partial(adapters.dora, rank=rank, alpha=2.5),
    "vera": lambda rank: partial(adapters.vera, rank=rank),
    "ia3": lambda rank: partial(adapters.ia3, inputs=None),
    "loha": lambda rank: partial(adapters.loha, rank=rank),
    "lokr": lambda rank: partial(adapters.lokr, rank=rank, decompose_both=rank % 2 == 0),
    "oft": lambda rank: partial(
        adapters.oft, block_size=2, shared=rank % 2 == 0, neumann_terms=None if rank > 2 else 5
    ),
    "adalora": lambda rank: partial(adapters.adalora, rank=rank),
}
LAYERS = st.tuples(st.sampled_from([8, 12, 20]), st.sampled_from([6, 16, 30]))
TARGETS = st.lists(st.sampled_from(["up", "gate", "down"]), min_size=1, max_size=3, unique=True)


@pytest.mark.ci
@pytest.mark.parametrize("method", mark_slow(METHODS, but=("ia3",)))  # test_all_methods holds lora by default
@settings(max_examples=3)
@given(sizes=LAYERS, targets=TARGETS, rank=st.integers(1, 4), half=st.booleans(), seed=st.integers(0, 99))
def test_adapter_preserves_base_and_merges(method, sizes, targets, rank, half, seed):
    """An adapter does not change the initial output; ten steps of AdamW leave frozen parameters bitwise equal; merging
    does not change the output."""
    keys = jax.random.split(jax.random.key(seed), 3)
    base = GatedMLP(sizes[0], mlp=sizes[1], key=keys[0])
    base = zoo.cast(base, jnp.bfloat16) if half and method not in ("pissa", "olora") else base
    x = jax.random.normal(keys[1], (2, 3, sizes[0]))
    before = base(x)[0]
    targets = ["up", *targets] if method == "lora" and "up" not in targets else targets  # rank_pattern names it
    adapted = METHODS[method](rank)(base, targets=targets, key=keys[2])
    scale = float(jnp.abs(before).max())
    np.testing.assert_allclose(adapted(x)[0], before, atol=3e-6 * scale)

    optimizer = optax.adamw(0.03, weight_decay=0.1)
    target = jnp.flip(before, -1) + 1

    @eqx.filter_jit
    def ten_steps(model):
        def step(carry, _):
            trainable, state = carry
            loss = lambda trainable: jnp.square(eqx.combine(trainable, model)(x)[0] - target).mean()
            updates, state = optimizer.update(jax.grad(loss)(trainable), state, trainable)
            return (eqx.apply_updates(trainable, updates), state), None

        trainable = zoo.trainable(model)
        (trainable, _), _ = jax.lax.scan(step, (trainable, optimizer.init(trainable)), length=10)
        return eqx.combine(trainable, model)

    trained = ten_steps(adapted)
    names = {path.name for path in list_parameter_paths(zoo.trainable(adapted))}
    assert names and all(f".{adapter}." in name for name in names for adapter in adapters.adapter_names(adapted))
    for path, old, new in zip(
        list_parameter_paths(adapted), jax.tree.leaves(adapted), jax.tree.leaves(trained), strict=True
    ):
        assert (path.name in names) != np.array_equal(old, new), path.name

    after, merged = trained(x)[0], adapters.merge(trained)
    assert jnp.abs(after - before).max() > 1e-3 * scale
    rounding = 2e-2 if half else 3e-5  # a merged weight is rounded to the dtype of its base
    np.testing.assert_allclose(merged(x)[0], after, atol=rounding * float(jnp.abs(after).max()))
    np.testing.assert_allclose(adapters.remove(trained)(x)[0], before, atol=3e-6 * scale)
