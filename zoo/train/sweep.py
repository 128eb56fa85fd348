"""Many runs of one model at a time: learning rates and seeds as one more dim in front of every array.

    rates, keys = sweep_grid([1e-3, 3e-3], seeds=[0, 1])                  # four runs
    models = sweep_models(make, keys)
    opt_states = sweep_map(lambda model: optimizer.init(zoo.trainable(model)))(models)
    step = sweep_step(loss_fn, optimizer)
    models, opt_states, losses = step(batch, models, opt_states, rates)

All runs are one compiled program, and their small matrix products are batched into larger ones: on a small model a few
runs take little longer than one, and none waits for a compilation of its own. For one device: `jax.vmap` puts a dim in
front that no layout knows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Key, PyTree, Shaped

from zoo.parallel import trainable

_Batch = Mapping[str, Shaped[Array, "batch ..."]]
_Step = Callable[[_Batch, PyTree, PyTree, Float[Array, "runs"]], tuple[PyTree, PyTree, Float[Array, "runs"]]]


def sweep_grid(
    learning_rates: Sequence[float | int], seeds: Sequence[int]
) -> tuple[Float[Array, "runs"], Key[Array, "runs"]]:
    """Every learning rate with every seed, seeds next to one another: a run's rate, and the key of its parameters.

    Runs of one seed start from the same parameters. **Raises** `ValueError` where there are none of either, and for a
    rate that is not above 0.
    """
    if not learning_rates or not seeds or not all(rate > 0 for rate in learning_rates):
        raise ValueError(
            f"a sweep wants learning rates above 0, and seeds: not {list(learning_rates)} and {list(seeds)}"
        )
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    return jnp.repeat(jnp.array(learning_rates, jnp.float32), len(seeds)), jnp.tile(keys, len(learning_rates))


def sweep_models(init_fn: Callable[[Key[Array, ""]], PyTree], keys: Key[Array, "runs"]) -> PyTree:
    """`make(key)` for every key, as one model whose arrays have "runs" in front."""
    return eqx.filter_jit(eqx.filter_vmap(init_fn))(keys)


def sweep_map(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one model, and of arguments that all models share, as a compiled function of stacked models.

    Its results have "runs" in front.
    """

    @eqx.filter_jit
    def mapped(models: PyTree, *shared: Any) -> PyTree:
        in_axes = (eqx.if_array(0), *(None for _ in shared))
        return eqx.filter_vmap(function, in_axes=in_axes)(models, *shared)

    return mapped


def sweep_step(
    loss_fn: Callable[[Any, _Batch], tuple[Float[Array, ""], Float[Array, ""]]],
    optimizer: optax.GradientTransformation,
) -> _Step:
    """A compiled `(batch, models, opt_states, rates) -> (models, opt_states, losses)` for stacked models.

    Each run r moves by p_r + rate_r * update_r, where `update` is what the optimizer does at a learning rate of 1: for
    `optax.adamw(schedule)`, a schedule whose peak is 1. That is the optimizer at this rate where the rate is its last
    factor, as in optax's own. All runs see the same batch. `models` and `opt_states` are donated.

    - `loss_fn`: as `zoo.value_and_grad` takes it, a sum and a count; gradients and `losses` are of their quotient.
    """

    def one(model: PyTree, opt_state: PyTree, rate: Float[Array, ""], batch: _Batch) -> tuple[PyTree, PyTree, Array]:
        learnt = trainable(model)

        def loss_of(learnt: PyTree) -> Float[Array, ""]:
            total, count = loss_fn(eqx.combine(learnt, model), batch)
            return total / jnp.maximum(count, 1)

        loss, grads = jax.value_and_grad(loss_of)(learnt)
        updates, opt_state = optimizer.update(grads, opt_state, learnt)
        updates = jax.tree.map(lambda update: (rate * update).astype(update.dtype), updates)
        return eqx.combine(eqx.apply_updates(learnt, updates), model), opt_state, loss

    @eqx.filter_jit(donate="all-except-first")
    def step(
        shared: tuple[_Batch, Float[Array, "runs"]], models: PyTree, opt_states: PyTree
    ) -> tuple[PyTree, PyTree, Float[Array, "runs"]]:
        batch, rates = shared
        mapped = eqx.filter_vmap(one, in_axes=(eqx.if_array(0), eqx.if_array(0), 0, None))
        return mapped(models, opt_states, rates, batch)

    return lambda batch, models, opt_states, rates: step((batch, rates), models, opt_states)
