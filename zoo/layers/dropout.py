"""Dropout that does not know how a batch is dealt out."""

from jaxtyping import Array, Float

from zoo.ops.dropout import dropout
from zoo.parallel import Module, manner, offset

from .info import Info


class Dropout(Module):
    """Zero a share `rate` of the values and scale the rest by 1 / (1 - rate) (Srivastava et al., JMLR 15, 2014).

    The mask is a function of the row's key and of a value's place in the row: the same on one device and on any mesh.
    Without keys, which is how a model runs at inference, the identity.
    """

    rate: float = manner()

    def __check_init__(self):
        if not 0 <= self.rate < 1:
            raise ValueError(f"a dropout rate is at least 0 and less than 1, not {self.rate}")

    def __call__(self, x: Float[Array, "batch seq embed"], info: Info, *, site: int) -> Float[Array, "batch seq embed"]:
        """`site` tells apart the places of one layer that drop values."""
        keys = info.fold(site).keys
        if keys is None or self.rate == 0:
            return x
        places = {"seq_offset": offset(x, "seq", x.shape[1]), "feature_offset": offset(x, "embed", x.shape[2])}
        return dropout(x, keys, rate=self.rate, **places)
