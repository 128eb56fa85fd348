"""Dropout that does not know how a batch is dealt out."""

from zoo.ops.dropout import dropout
from zoo.parallel import Module, implementation_option, shard_offset
from zoo.shapes import HiddenStates

from .token_info import TokenInfo


class Dropout(Module):
    """Zero a share `rate` of the values and scale the rest by 1 / (1 - rate) (Srivastava et al., JMLR 15, 2014).

    The mask is a function of the row's key and of a value's place in the row: the same on one device and on any mesh.
    Without keys, which is how a model runs at inference, the identity.
    """

    rate: float = implementation_option()

    def __check_init__(self):
        if not 0 <= self.rate < 1:
            raise ValueError(f"a dropout rate is at least 0 and less than 1, not {self.rate}")

    def __call__(self, x: HiddenStates, info: TokenInfo, *, site: int) -> HiddenStates:
        """`site` tells apart the places of one layer that drop values."""
        keys = info.fold_keys(site).keys
        if keys is None or self.rate == 0:
            return x
        places = {
            "seq_offset": shard_offset(x, "seq", x.shape[1]),
            "feature_offset": shard_offset(x, "embed", x.shape[2]),
        }
        return dropout(x, keys, rate=self.rate, **places)
