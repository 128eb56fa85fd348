"""Learning rate schedules."""

import optax


def warmup_cosine(learning_rate: float | int, warmup_steps: int, steps: int) -> optax.Schedule:
    """Return a learning rate schedule: linear warmup to the peak `learning_rate`, cosine decay to a tenth at `steps`.

    The warmup takes at most half of the steps.
    """
    warmup_steps = min(warmup_steps, steps // 2)
    return optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup_steps, steps, learning_rate / 10)
