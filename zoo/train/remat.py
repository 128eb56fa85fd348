"""Rematerialization of a loaded model."""

from zoo.models import AbstractStack, Decoder, Stack, swap_stack
from zoo.parallel import Remat, replace_option


def rematerialize(model: Decoder, remat: Remat) -> Decoder:
    """Return `model` with another rematerialization policy: what its backward pass recomputes to save memory.

    **Raises** `ValueError` if the model's layers are not in a `Stack`.
    """

    def set_remat(stack: AbstractStack) -> AbstractStack:
        if not isinstance(stack, Stack):
            raise ValueError(f"{type(stack).__name__} does not rematerialize: swap in a Stack before")
        return replace_option(stack, "remat", remat)

    return swap_stack(model, set_remat)
