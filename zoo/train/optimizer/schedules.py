"""Learning rate schedules: of recipes, and those that optax lacks."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float

DecayShape = Literal["sqrt", "linear", "cosine"]


def warmup_cosine(
    peak: float, warmup_steps: int, steps: int, *, end: float = 0.1
) -> Callable[[ArrayLike], Float[Array, "..."]]:
    """Return a schedule that rises linearly from 0 to `peak` over `warmup_steps`, at most half of `steps`, and falls by
    half a cosine to `end` times `peak`.

    It is compiled, as one program: a loop that logs the rate of each step would otherwise run ten.
    """
    warmup_steps = min(warmup_steps, steps // 2)
    return jax.jit(optax.warmup_cosine_decay_schedule(0.0, peak, warmup_steps, steps, end * peak))


def warmup_stable_decay(
    peak: float, warmup_steps: int, steps: int, decay_steps: int, shape: DecayShape = "sqrt", *, end: float = 0.0
) -> optax.Schedule:
    """Return a schedule that rises linearly from 0 to `peak`, stays there, and decays to `end` over the last
    `decay_steps` of `steps`.

    With x from 0 to 1 over the decay, the rate is end + (peak - end) f(x):

        sqrt: 1 - sqrt(x)      linear: 1 - x      cosine: (1 + cos(pi x)) / 2

    The square root reached the lowest loss of those that Hägele et al. compared (arXiv:2405.18392, section 4). Before
    the decay, the rate does not depend on `steps`: runs of any length branch off one stable run, which has
    `decay_steps=0`.

    **Raises** `ValueError` for negative steps, warmup and decay longer than `steps`, or another shape.
    """
    if shape not in ("sqrt", "linear", "cosine"):
        raise ValueError(f"a decay is sqrt, linear or cosine, not {shape!r}")
    if min(warmup_steps, decay_steps) < 0 or warmup_steps + decay_steps > steps:
        raise ValueError(
            f"{warmup_steps} steps of warmup and {decay_steps} of decay do not fit into {steps} steps: take 0 or more "
            "of each, together at most all"
        )

    def decay(step: ArrayLike) -> Array:
        x = jnp.clip(jnp.asarray(step) / max(decay_steps, 1), 0, 1)
        if shape == "sqrt":
            remaining = 1 - jnp.sqrt(x)
        elif shape == "linear":
            remaining = 1 - x
        else:
            remaining = (1 + jnp.cos(jnp.pi * x)) / 2
        return end + (peak - end) * remaining

    warmup = optax.linear_schedule(0.0, peak, warmup_steps)
    if decay_steps == 0:
        return optax.join_schedules([warmup, optax.constant_schedule(peak)], [warmup_steps])
    stable = optax.constant_schedule(peak)
    return optax.join_schedules([warmup, stable, decay], [warmup_steps, steps - decay_steps])
