"""Dropout whose mask does not depend on the mesh."""

from typing import ClassVar

from zoo.ops.dropout import dropout
from zoo.parallel import Module, implementation_option
from zoo.parallel.collectives import shard_offset
from zoo.shapes import ResidualStream

from .token_info import TokenInfo


class Dropout(Module):
    """Zero values with probability `rate` and scale the rest by 1 / (1 - rate) (Srivastava et al., JMLR 15, 2014).

    The dropout mask is a function of the row's PRNG key and of a value's index in the row: the same on one device and
    on any mesh. Without keys, as at inference, dropout is the identity.
    """

    hides_value: ClassVar[bool] = True  # a block calls it several times, and its values have names elsewhere

    rate: float = implementation_option()

    def __check_init__(self):
        if not 0 <= self.rate < 1:
            raise ValueError(f"a dropout rate is at least 0 and less than 1, not {self.rate}")

    def __call__(self, x: ResidualStream, info: TokenInfo, *, site: int) -> ResidualStream:
        """`site` numbers the dropouts of one block, so that their masks differ."""
        keys = info.fold_keys(site).keys
        if keys is None or self.rate == 0:
            return x
        offsets = {
            "seq_offset": shard_offset(x, "tokens", x.shape[1]),
            "feature_offset": shard_offset(x, "embed", x.shape[2]),
        }
        return dropout(x, keys, rate=self.rate, **offsets)
