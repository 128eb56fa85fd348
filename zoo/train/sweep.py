"""Sweeps over learning rates and seeds, vmapped: every array gets a leading dim "runs".

    def make_optimizer(rate):
        return optax.adamw(lambda step: rate * schedule(step))

    rates, keys = sweep_grid([1e-3, 3e-3], seeds=[0, 1])                  # four runs
    models, opt_states = sweep_init(init_fn, make_optimizer, rates, keys)
    step = sweep_step(loss_fn, make_optimizer)
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
_MakeOptimizer = Callable[[Float[Array, ""]], optax.GradientTransformation]
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


def sweep_init(
    init_fn: Callable[[Key[Array, ""]], PyTree],
    make_optimizer: _MakeOptimizer,
    rates: Float[Array, "runs"],
    keys: Key[Array, "runs"],
) -> tuple[PyTree, PyTree]:
    """Initialize a model and an optimizer state per run, stacked: every array has a leading dim "runs"."""

    @eqx.filter_jit
    @eqx.filter_vmap
    def init_run(rate: Float[Array, ""], key: Key[Array, ""]) -> tuple[PyTree, PyTree]:
        model = init_fn(key)
        return model, make_optimizer(rate).init(trainable(model))

    return init_run(rates, keys)


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
    make_optimizer: _MakeOptimizer,
) -> _Step:
    """Return a compiled step for stacked models: `(batch, models, opt_states, rates) -> (models, opt_states, metrics)`.

    All runs see the same batch. `models` and `opt_states` are donated. The metrics are "losses" and "gradient_norm",
    before clipping, of each run.

    - `loss_fn`: returns a sum and a count, as for `zoo.value_and_grad`; losses and gradients are computed from their
      quotient.
    - `make_optimizer`: called with the rate of a run, a traced number, within the step. Multiply a schedule by it.
    """

    def step_run(
        model: PyTree, opt_state: PyTree, rate: Float[Array, ""], batch: _Batch
    ) -> tuple[PyTree, PyTree, dict[str, Float[Array, ""]]]:
        params = trainable(model)

        def mean_loss(params: PyTree) -> Float[Array, ""]:
            total, count = loss_fn(eqx.combine(params, model), batch)
            return total / jnp.where(count == 0, 1, count)

        loss, grads = jax.value_and_grad(mean_loss)(params)
        updates, opt_state = make_optimizer(rate).update(grads, opt_state, params)
        metrics = {"losses": loss, "gradient_norm": optax.tree.norm(grads)}
        return eqx.combine(optax.apply_updates(params, updates), model), opt_state, metrics

    @eqx.filter_jit(donate="all-except-first")
    def step(
        shared: tuple[_Batch, Float[Array, "runs"]], models: PyTree, opt_states: PyTree
    ) -> tuple[PyTree, PyTree, dict[str, Float[Array, "runs"]]]:
        batch, rates = shared
        step_runs = eqx.filter_vmap(step_run, in_axes=(eqx.if_array(0), eqx.if_array(0), 0, None))
        return step_runs(models, opt_states, rates, batch)

    return lambda batch, models, opt_states, rates: step((batch, rates), models, opt_states)
