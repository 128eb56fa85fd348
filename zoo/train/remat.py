"""How a model that was read from files computes its gradients."""

import copy

from zoo.models import AbstractStack, Decoder, Stack, swap_stack
from zoo.parallel import Remat


def rematerialize(model: Decoder, remat: Remat) -> Decoder:
    """`model`, whose backward pass computes again what `remat` says, to save memory."""

    def other(stack: AbstractStack) -> AbstractStack:
        if not isinstance(stack, Stack):
            raise ValueError(f"{type(stack).__name__} does not compute its layers again: swap in a Stack before")
        stack = copy.copy(stack)
        object.__setattr__(stack, "remat", remat)  # of a copy that nobody else has
        return stack

    return swap_stack(model, other)
