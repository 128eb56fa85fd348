"""Sweeps over learning rates and seeds, vmapped: every array gets a leading dim "runs".

    rates, keys = sweep_grid([1e-3, 3e-3], seeds=[0, 1])                  # four runs
    models = sweep_models(init_fn, keys)
    opt_states = sweep_map(lambda model: optimizer.init(zoo.trainable(model)))(models)
    step = sweep_step(loss_fn, optimizer)
    models, opt_states, metrics = step(batch, models, opt_states, rates)  # of each run, "losses" and "gradient_norm"

All runs are one compiled program whose small matrix products are batched into larger ones: on a small model, a few runs
take little longer than one. For a single device, since the layout has no row for the dim that `jax.vmap` adds.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Key, PyTree, Shaped

from zoo.parallel.module import trainable

_Batch = Mapping[str, Shaped[Array, "batch ..."]]
_Step = Callable[[_Batch, PyTree, PyTree, Float[Array, "runs"]], tuple[PyTree, PyTree, dict[str, Float[Array, "runs"]]]]


def sweep_grid(
    learning_rates: Sequence[float | int], seeds: Sequence[int]
) -> tuple[Float[Array, "runs"], Key[Array, "runs"]]:
    """Return the learning rate and the parameter key of each run: every rate with every seed, seeds varying fastest.

    Runs with the same seed start from the same parameters. **Raises** `ValueError` for an empty list, or a rate that is
    not positive.
    """
    if not learning_rates or not seeds or not all(rate > 0 for rate in learning_rates):
        raise ValueError(
            f"a sweep wants learning rates above 0, and seeds: not {list(learning_rates)} and {list(seeds)}"
        )
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    return jnp.repeat(jnp.array(learning_rates, jnp.float32), len(seeds)), jnp.tile(keys, len(learning_rates))


def sweep_models(init_fn: Callable[[Key[Array, ""]], PyTree], keys: Key[Array, "runs"]) -> PyTree:
    """Initialize a model per key, stacked: every array has a leading dim "runs"."""
    return eqx.filter_jit(eqx.filter_vmap(init_fn))(keys)


def sweep_map(function: Callable[..., Any]) -> Callable[..., Any]:
    """Vmap and jit a function of one model, and of arguments shared by all runs, over stacked models.

    Results have a leading dim "runs".
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
    """Return a compiled step for stacked models: `(batch, models, opt_states, rates) -> (models, opt_states, metrics)`.

    Run r is updated to p_r + rate_r * update_r, with the update of the optimizer at learning rate 1: for
    `optax.adamw(schedule)`, a schedule whose peak is 1. This equals the optimizer at that rate if the rate is its last
    factor, as in optax. All runs see the same batch. `models` and `opt_states` are donated.
    The metrics are "losses" and "gradient_norm", before clipping, of each run.

    - `loss_fn`: returns a sum and a count, as for `zoo.value_and_grad`; losses and gradients are computed from their
      quotient.
    """

    def step_run(
        model: PyTree, opt_state: PyTree, rate: Float[Array, ""], batch: _Batch
    ) -> tuple[PyTree, PyTree, dict[str, Float[Array, ""]]]:
        params = trainable(model)

        def mean_loss(params: PyTree) -> Float[Array, ""]:
            total, count = loss_fn(eqx.combine(params, model), batch)
            return total / jnp.where(count == 0, 1, count)

        loss, grads = jax.value_and_grad(mean_loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        updates = jax.tree.map(lambda update: (rate * update).astype(update.dtype), updates)
        metrics = {"losses": loss, "gradient_norm": optax.tree.norm(grads)}
        return eqx.combine(eqx.apply_updates(params, updates), model), opt_state, metrics

    @eqx.filter_jit(donate="all-except-first")
    def step(
        shared: tuple[_Batch, Float[Array, "runs"]], models: PyTree, opt_states: PyTree
    ) -> tuple[PyTree, PyTree, dict[str, Float[Array, "runs"]]]:
        batch, rates = shared
        step_runs = eqx.filter_vmap(step_run, in_axes=(eqx.if_array(0), eqx.if_array(0), 0, None))
        return step_runs(models, opt_states, rates, batch)

    return lambda batch, models, opt_states, rates: step((batch, rates), models, opt_states)
