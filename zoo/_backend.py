"""The error of a program whose devices JAX cannot start, in one line."""

import os

import jax


def describe_backend_error(error: BaseException) -> str | None:
    """Return a line that says what to do if JAX cannot start the devices of `JAX_PLATFORMS`; None for another error.

    JAX raises a `RuntimeError`, or a bare `AssertionError` for `JAX_PLATFORMS=cuda` without a GPU, from wherever the
    first computation is. So this asks JAX for its devices once more.
    """
    if not isinstance(error, RuntimeError | AssertionError):
        return None
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as reason:
        platforms = os.environ.get("JAX_PLATFORMS")
        named = f"JAX_PLATFORMS={platforms}: " if platforms else ""
        found = f" ({reason})" if str(reason) else ""
        return (
            f"{named}JAX finds no such device{found}. GPUs need a driver and pip install 'equizoo[cuda]', TPUs "
            "'equizoo[tpu]'; JAX_PLATFORMS=cpu computes on the CPU"
        )
    return None
