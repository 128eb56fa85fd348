"""Learned augmented residual layer (LAuReL)."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Key

from zoo.parallel import Dim, Module
from zoo.shapes import ResidualStream

from .abstract import AbstractLinear, AbstractNorm
from .linear import Linear


class Laurel(Module):
    """y = x + norm(W_right W_left x): a residual connection with a low-rank learned part (LAuReL-LR; Menghani et al.,
    arXiv:2411.07501, section 2; with a norm in Gemma 3n, 2025)."""

    left: AbstractLinear
    right: AbstractLinear
    norm: AbstractNorm

    def __init__(self, embed: int, rank: int, norm: Callable[[], AbstractNorm], *, key: Key[Array, ""]):
        """`norm`: a factory of the norm of the learned part."""
        left_key, right_key = jax.random.split(key)
        self.left = Linear(embed, rank, in_=Dim("embed"), out=Dim("rank"), key=left_key)
        self.right = Linear(rank, embed, in_=Dim("rank"), out=Dim("embed"), key=right_key)
        self.norm = norm()

    def __call__(self, x: ResidualStream) -> ResidualStream:
        return x + self.norm(self.right(self.left(x)))
