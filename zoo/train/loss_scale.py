"""Dynamic loss scaling, for float16."""

import math
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from .skip import LossScaleState, all_finite, find_states, skip_nonfinite


def dynamic_loss_scale(
    optimizer: optax.GradientTransformation,
    *,
    initial: float | int = 2.0**15,
    growth_interval: int = 2000,
    minimum: float | int = 2.0**-24,
    maximum: float | int = 2.0**24,
) -> optax.GradientTransformationExtraArgs:
    """Add a loss scale to the state of `optimizer`, and skip the steps in which it was too large (Micikevicius et al.,
    arXiv:1710.03740, section 3.2; `torch.amp.GradScaler`).

        optimizer = train.dynamic_loss_scale(optax.adamw(schedule))
        ...
        scale = train.loss_scale(opt_state)
        loss, grads = zoo.value_and_grad(loss_fn, mesh)(model, batch, loss_scale=scale)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))

    float16 has no values below 6e-8 and none above 65,504. Multiplying the loss by a scale keeps small gradients of the
    backward pass above the first bound; `value_and_grad` divides by the scale in float32. If a gradient is not finite,
    it has overflowed: the step is skipped as by `skip_nonfinite`, and the scale is halved. After `growth_interval`
    steps without an overflow, the scale doubles. Scales are powers of two, which round nothing, between `minimum` and
    `maximum`.

    The losses of this library are sums over tokens, and the mean is taken in float32. So a gradient in the backward
    pass is larger than the gradient of a mean by a factor of the number of tokens on a device, and the scale settles
    lower by the same factor; it may be below 1.

    **Raises** `ValueError` for bounds that are not powers of two or do not hold `initial`, and an interval below 1.
    """
    bounds = {"minimum": minimum, "initial": initial, "maximum": maximum}
    if any(not x > 0 or math.frexp(x)[0] != 0.5 for x in bounds.values()):
        raise ValueError(f"loss scales are powers of two, so that they round nothing, not {bounds}")
    if not minimum <= initial <= maximum or growth_interval < 1:
        raise ValueError(
            f"a loss scale starts within its bounds and grows after some steps: {bounds}, {growth_interval=}"
        )
    skipping = skip_nonfinite(optimizer)

    def init(params: PyTree) -> LossScaleState:
        return LossScaleState(skipping.init(params), jnp.float32(initial), jnp.zeros((), jnp.int32))

    def update(updates: PyTree, state: Any, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        new_updates, skips = skipping.update(updates, state.skips, params, **extra)
        is_good = all_finite(updates)
        good_steps = jnp.where(is_good, state.good_steps + 1, 0)
        grows = good_steps >= growth_interval
        factor = jnp.where(is_good, jnp.where(grows, 2.0, 1.0), 0.5)
        scale = jnp.clip(state.scale * factor, minimum, maximum)
        return new_updates, LossScaleState(skips, scale, jnp.where(grows, 0, good_steps))

    return optax.GradientTransformationExtraArgs(init, update)


def loss_scale(opt_state: PyTree) -> Float[Array, ""] | None:
    """Return the loss scale in the state of an optimizer, for `value_and_grad(...)(..., loss_scale=)`; None if the
    state does not have one."""
    return next((state.scale for state in find_states(opt_state, LossScaleState)), None)
