"""Rematerialization of a loaded model."""

import copy

from zoo.models import AbstractStack, Decoder, Stack, swap_stack
from zoo.parallel import Remat


def rematerialize(model: Decoder, remat: Remat) -> Decoder:
    """Return `model` with another rematerialization policy: what its backward pass recomputes to save memory.

    **Raises** `ValueError` if the model's layers are not in a `Stack`.
    """

    def set_remat(stack: AbstractStack) -> AbstractStack:
        if not isinstance(stack, Stack):
            raise ValueError(f"{type(stack).__name__} does not rematerialize: swap in a Stack before")
        stack = copy.copy(stack)
        object.__setattr__(stack, "remat", remat)  # safe: nobody else holds this copy
        return stack

    return swap_stack(model, set_remat)
