"""Pooling of SigLIP's encoder of texts."""

from jaxtyping import Array, Float, Key

from zoo.layers import AbstractLinear, Linear
from zoo.layers.encoders.pooling import AbstractPooler
from zoo.parallel import Dim
from zoo.shapes import HiddenStates, PaddingMask


class LastPlacePooler(AbstractPooler):
    """W x + b of the last place, also where it is padding, which SigLIP's encoder of texts reads as text (Zhai et al.,
    arXiv:2303.15343)."""

    linear: AbstractLinear

    def __init__(self, embed: int, size: int, *, key: Key[Array, ""]):
        """`size`: of the result."""
        self.linear = Linear(embed, size, in_=Dim("embed"), bias=True, key=key)

    def __call__(self, x: HiddenStates, mask: PaddingMask | None = None) -> Float[Array, "batch _"]:
        """**Raises** `ValueError` for a mask."""
        if mask is not None:
            raise ValueError("padding is read as text by this model: pad every text to one length, and pass no mask")
        return self.linear(x[:, -1])
