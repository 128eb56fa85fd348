"""Base class of LoRA and DoRA: low-rank factors A and B, and dropout on the inputs of A."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.layers import AbstractLinear, Linear, TokenInfo
from zoo.ops.dropout import dropout
from zoo.parallel import Dim, buffer, implementation_option
from zoo.parallel.collectives import shard_offset
from zoo.parallel.fields import adapter_parameter

from ..base import AbstractLinearAdapter, Matrix

_BASE_SITE_OFFSET = 2**20
"""Added to the dropout site of the base, so that an adapter and its base draw different masks."""


class AbstractLowRankAdapter(AbstractLinearAdapter):
    """An adapter with the low-rank update scale B A, with A of shape [rank, in] and B of shape [out, rank]."""

    down: Linear = adapter_parameter()
    """A."""
    up: Linear = adapter_parameter()
    """B."""
    rank: Int[Array, ""]
    """Rank of this layer. The arrays have the largest rank of all stacked layers, padded with zeros."""
    scale: Float[Array, ""] = buffer()
    keys: Key[Array, "batch"] | None
    """PRNG keys of dropout, one per row of the batch, in training."""

    dropout: float = implementation_option()
    """Dropout rate of the inputs of A, applied if there are keys (Hu et al., arXiv:2106.09685, appendix D)."""

    def __init__(
        self,
        base: AbstractLinear,
        *,
        down: Float[Array, "rank in"],
        up: Float[Array, "out rank"],
        rank: Int[Array, ""],
        scale: Float[Array, ""],
        dropout: float | int,
        adapter_name: str,
    ):
        super().__init__(base, adapter_name=adapter_name)
        self.down = linear_from_weight(down, in_=self.in_, out=Dim("rank"))
        self.up = linear_from_weight(up, in_=Dim("rank"), out=self.out)
        self.rank = rank
        self.scale = scale
        self.keys = None
        self.dropout = check_dropout_rate(dropout)

    @property
    def has_adapter(self) -> Bool[Array, "*stacked"]:
        return self.rank > 0

    def with_dropout_keys(self, info: TokenInfo, site: int) -> "AbstractLowRankAdapter":
        keys = info.fold_keys(site).keys if self.dropout else None
        base = self.base.with_dropout_keys(info, site + _BASE_SITE_OFFSET)
        return eqx.tree_at(
            lambda adapter: (adapter.base, adapter.keys), self, (base, keys), is_leaf=lambda x: x is None
        )

    def drop_inputs(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows in"]:
        """Cast `x` to the dtype of A and apply dropout. **Raises** `NotImplementedError` for dropout on inputs that are
        not the tokens of a batch."""
        x = x.astype(self.down.weight.dtype)
        if self.keys is None:
            return x
        if x.ndim != 3 or len(x) != len(self.keys):
            raise NotImplementedError(
                f"the adapter {self.adapter_name!r} has dropout={self.dropout} and reads {list(x.shape)}, where rows "
                "of tokens were expected: leave dropout out"
            )
        seq_offset = shard_offset(x, "seq", x.shape[1])
        feature_offset = shard_offset(x, self.in_.name, x.shape[2])
        return dropout(x, self.keys, rate=self.dropout, seq_offset=seq_offset, feature_offset=feature_offset)

    def strength_per_expert(self, like: Float[Array, "*experts"]) -> Float[Array, "*experts"]:
        if self.keys is not None and like.ndim:
            raise NotImplementedError(
                f"the adapter {self.adapter_name!r} has dropout={self.dropout} and wraps experts, who see rows in "
                "another order: leave dropout out"
            )
        return super().strength_per_expert(like)

    def project_down(self, x: Float[Array, "*rows in"], factor: Float[Array, "..."]) -> Float[Array, "*rows rank"]:
        """Return factor A x, with dropout on x."""
        inner = self.down(self.drop_inputs(x))
        return (inner * factor).astype(inner.dtype)


def check_dropout_rate(rate: float | int) -> float:
    """Return a dropout rate as a float. **Raises** `ValueError` outside [0, 1)."""
    if not 0 <= rate < 1:
        raise ValueError(f"a dropout rate is at least 0 and less than 1, not {rate}")
    return float(rate)


def low_rank_product(down: Linear, up: Linear) -> Matrix:
    """Return B A in float32."""
    return jnp.matmul(up.dense_weight, down.dense_weight, precision="highest")


def linear_from_weight(weight: Float[Array, "out in"], *, in_: Dim, out: Dim) -> Linear:
    """Return a `Linear` with this weight and no bias."""
    linear = eqx.filter_eval_shape(Linear, *weight.shape[::-1], in_=in_, out=out, key=jax.random.key(0))
    return eqx.tree_at(lambda linear: linear.weight, linear, weight)
