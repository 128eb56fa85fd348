"""What every adapter promises, of random matrices, ranks, targets and dtypes."""

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


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=5)
@given(sizes=LAYERS, targets=TARGETS, rank=st.integers(1, 4), half=st.booleans(), seed=st.integers(0, 99))
def test_born_as_it_was_learnt_alone_and_merged(method, sizes, targets, rank, half, seed):
    """The same numbers at birth; after ten steps of AdamW what is not learnt is as it was, bit for bit; and merged it
    computes what it computed."""
    keys = jax.random.split(jax.random.key(seed), 3)
    base = GatedMLP(sizes[0], mlp=sizes[1], key=keys[0])
    base = zoo.cast(base, jnp.bfloat16) if half and method not in ("pissa", "olora") else base
    x = jax.random.normal(keys[1], (2, 3, sizes[0]))
    before = base(x)[0]
    targets = ["up", *targets] if method == "lora" and "up" not in targets else targets  # its pattern means that one
    adapted = METHODS[method](rank)(base, targets=targets, key=keys[2])
    scale = float(jnp.abs(before).max())
    np.testing.assert_allclose(adapted(x)[0], before, atol=3e-6 * scale)

    optimizer = optax.adamw(0.03, weight_decay=0.1)
    target = jnp.flip(before, -1) + 1

    @eqx.filter_jit
    def ten_steps(model):
        def step(carry, _):
            tuned, state = carry
            loss = lambda tuned: jnp.square(eqx.combine(tuned, model)(x)[0] - target).mean()
            updates, state = optimizer.update(jax.grad(loss)(tuned), state, tuned)
            return (eqx.apply_updates(tuned, updates), state), None

        tuned = zoo.trainable(model)
        (tuned, _), _ = jax.lax.scan(step, (tuned, optimizer.init(tuned)), length=10)
        return eqx.combine(tuned, model)

    learnt = ten_steps(adapted)
    names = {place.name for place in list_parameter_paths(zoo.trainable(adapted))}
    assert names and all(f".{label}." in name for name in names for label in adapters.adapter_names(adapted))
    for place, old, new in zip(
        list_parameter_paths(adapted), jax.tree.leaves(adapted), jax.tree.leaves(learnt), strict=True
    ):
        assert (place.name in names) != np.array_equal(old, new), place.name

    after, merged = learnt(x)[0], adapters.merge(learnt)
    assert jnp.abs(after - before).max() > 1e-3 * scale
    rounding = 2e-2 if half else 3e-5  # a merged matrix is rounded to the dtype of its base
    np.testing.assert_allclose(merged(x)[0], after, atol=rounding * float(jnp.abs(after).max()))
    np.testing.assert_allclose(adapters.remove(learnt)(x)[0], before, atol=3e-6 * scale)
