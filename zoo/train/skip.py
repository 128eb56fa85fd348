"""Optimizers that skip steps with gradients that are not finite."""

from collections.abc import Iterator
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
        is_skipped = ~all_finite(updates)
        run = lambda: optimizer.update(updates, state.inner, params, **extra)
        shapes, _ = jax.eval_shape(run)

        def skip() -> tuple[PyTree, Any]:
            # x + -0.0 is x for every x, bit for bit; -0.0 + 0.0 is 0.0.
            return jax.tree.map(lambda x: jnp.full(x.shape, -0.0, x.dtype), shapes), state.inner

        new_updates, inner = jax.lax.cond(is_skipped, skip, run)
        in_a_row = jnp.where(is_skipped, state.in_a_row + 1, 0)
        return new_updates, SkipState(inner, state.skipped + is_skipped, in_a_row)

    return optax.GradientTransformationExtraArgs(init, update)


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
