"""Optimizers that skip steps: steps with gradients that are not finite, and steps with a spike of the loss."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree


class SkipState(NamedTuple):
    """State of an optimizer that skips steps: the inner optimizer's state, and counters."""

    inner: Any
    skipped: Int[Array, ""]
    """Steps skipped so far."""
    in_a_row: Int[Array, ""]
    """Steps skipped in a row, up to the newest step."""


class SpikeState(NamedTuple):
    """Running mean and variance of the loss, to which each step contributes 1 / `window`."""

    mean: Float[Array, ""]
    variance: Float[Array, ""]
    steps: Int[Array, ""]
    """Steps so far."""


class SpikeSkipState(NamedTuple):
    """State of `skip_spikes`."""

    skips: SkipState
    statistics: SpikeState


def skip_nonfinite(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Skip each step whose gradient holds NaN or infinity: parameters and the state of `optimizer` stay bit for bit as
    they were, weight decay and schedules included, and the step is counted.

        optimizer = train.skip_nonfinite(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)))

    It is the outermost transformation. The decision is the same on all devices, since the gradient is the sum over all
    of them. A `Run` goes on after a skipped step whose metrics have `count_skips`, and stops after several in a row.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> SkipState:
        return SkipState(optimizer.init(params), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        run = lambda: optimizer.update(updates, state.inner, params, **extra)
        return update_unless(~all_finite(updates), run, state)

    return optax.GradientTransformationExtraArgs(init, update)


def skip_spikes(
    optimizer: optax.GradientTransformation, *, sigmas: float | int = 6.0, window: int = 100
) -> optax.GradientTransformationExtraArgs:
    """Skip the rows of a loss spike: a step whose loss is more than `sigmas` standard deviations above its running
    mean. `optimizer.update(grads, opt_state, params, value=loss)` passes the loss, or another measure of the step.

    Mean and variance are exponential averages over about `window` steps; no step is skipped in the first `window`. A
    spike enters them clipped to the threshold, so that a loss that stays at a higher level is accepted after some
    steps.
    Chowdhery et al. (arXiv:2204.02311, section 5.1) skip the rows around a spike, and go back to an earlier checkpoint,
    as `Run.rewind` does.

    **Raises** `ValueError` for a window below 2 or sigmas that are not above 0; `TypeError`, in the update, without a
    `value`.
    """
    if window < 2 or not sigmas > 0:
        raise ValueError(f"a spike is some sigmas above 0 above the mean of 2 steps or more, not {sigmas=}, {window=}")
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> SpikeSkipState:
        zero = jnp.zeros((), jnp.int32)
        mean, variance = (jnp.zeros((), jnp.float32) for _ in range(2))  # donated separately
        statistics = SpikeState(mean, variance, zero)
        return SpikeSkipState(SkipState(optimizer.init(params), zero, zero), statistics)

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree = None,
        *,
        value: Float[Array, ""] | float | None = None,
        **extra: Any,
    ) -> tuple[PyTree, Any]:
        if value is None:
            raise TypeError("skip_spikes reads the loss: optimizer.update(grads, opt_state, params, value=loss)")
        value = jnp.asarray(value, jnp.float32)
        mean, variance, steps = state.statistics
        threshold = mean + sigmas * jnp.sqrt(variance)
        is_spike = (steps >= window) & ~(value <= threshold)
        run = lambda: optimizer.update(updates, state.skips.inner, params, value=value, **extra)
        new_updates, skips = update_unless(is_spike, run, state.skips)
        cut = jnp.where(is_spike, threshold, value)
        rate = 1 / jnp.minimum(steps + 1, window)  # the plain average, until there are `window` steps
        difference = cut - mean
        counted = SpikeState(mean + rate * difference, (1 - rate) * (variance + rate * difference**2), steps + 1)
        # A loss of NaN or infinity would stay in the averages forever, and every later one would count as a spike.
        is_counted = jnp.isfinite(value)
        statistics = jax.tree.map(lambda new, old: jnp.where(is_counted, new, old), counted, state.statistics)
        return new_updates, SpikeSkipState(skips, statistics)

    return optax.GradientTransformationExtraArgs(init, update)


def update_unless(
    is_skipped: Bool[Array, ""], run: Callable[[], tuple[PyTree, Any]], state: SkipState
) -> tuple[PyTree, SkipState]:
    """Return the updates and the state of `run()`, or updates that change nothing and `state`; count the steps
    skipped."""
    shapes, _ = jax.eval_shape(run)

    def skip() -> tuple[PyTree, Any]:
        # x + -0.0 is x for every x, bit for bit; -0.0 + 0.0 is 0.0.
        return jax.tree.map(lambda x: jnp.full(x.shape, -0.0, x.dtype), shapes), state.inner

    updates, inner = jax.lax.cond(is_skipped, skip, run)
    in_a_row = jnp.where(is_skipped, state.in_a_row + 1, 0)
    return updates, SkipState(inner, state.skipped + is_skipped, in_a_row)


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Return True if no array of `tree` holds NaN or infinity."""
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack(finite).all() if finite else jnp.array(True)


def count_skips(opt_state: PyTree) -> dict[str, Array]:
    """Return `skipped_steps` and `skipped_in_a_row` of an optimizer that skips steps, and its `loss_scale` if it has
    one, as metrics to log; {} for any other optimizer. Nothing waits for the device."""
    found = {}
    for state in find_states(opt_state, SkipState):
        # Copies: the state itself is donated to the next step, before the metrics are fetched.
        for name, count in {"skipped_steps": state.skipped, "skipped_in_a_row": state.in_a_row}.items():
            found[name] = found[name] + count if name in found else jnp.copy(count)
    for state in find_states(opt_state, LossScaleState):
        found["loss_scale"] = jnp.copy(state.scale)
    return found


class LossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`."""

    skips: Any
    """A `SkipState`."""
    scale: Float[Array, ""]
    """Factor of the loss in the next step."""
    good_steps: Int[Array, ""]
    """Steps since the scale was changed."""


def find_states(opt_state: PyTree, kind: type) -> Iterator[Any]:
    """Yield the states of one kind in the state of an optimizer, including states inside others."""
    for state in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind)):
        if isinstance(state, kind):
            yield state
            yield from find_states(tuple(state), kind)
