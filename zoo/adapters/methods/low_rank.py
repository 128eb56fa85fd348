"""What LoRA and its kin share: A and B, two narrow matrices, and what is dropped before them in training."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.layers import Linear, TokenInfo
from zoo.ops.dropout import dropout
from zoo.parallel import Dim, shard_offset

from ..base import AbstractAdapter, Matrix


class AbstractLowRankAdapter(AbstractAdapter):
    """An adapter with scale B A in it, A of shape [rank, in] and B of shape [out, rank]."""

    down: eqx.AbstractVar[Linear]
    """A."""
    up: eqx.AbstractVar[Linear]
    """B."""
    rank: eqx.AbstractVar[Int[Array, ""]]
    """How much of the arrays' rank counts; the rest is zero."""
    scale: eqx.AbstractVar[Float[Array, ""]]
    keys: eqx.AbstractVar[Key[Array, "batch"] | None]
    """Of the rows of a batch, in training."""
    dropout: eqx.AbstractVar[float]
    """The share of what A reads that is zeroed where there are keys (Hu et al., arXiv:2106.09685, appendix D)."""

    def with_dropout_keys(self, info: TokenInfo, site: int) -> "AbstractLowRankAdapter":
        keys = info.fold_keys(site).keys if self.dropout else None
        where = lambda adapter: (adapter.base, adapter.keys)
        return eqx.tree_at(
            where,
            self,
            (self.base.with_dropout_keys(info, site + _BASE_SITE_OFFSET), keys),
            is_leaf=lambda x: x is None,
        )

    def drop_inputs(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows in"]:
        """What A reads. **Raises** `NotImplementedError` for something else than the tokens of a batch."""
        x = x.astype(self.down.weight.dtype)
        if self.keys is None:
            return x
        if x.ndim != 3 or len(x) != len(self.keys):
            raise NotImplementedError(
                f"the adapter {self.adapter_name!r} has dropout={self.dropout} and reads {list(x.shape)}, where rows of "
                "tokens were expected: leave dropout out"
            )
        places = {"seq_offset": shard_offset(x, "seq", x.shape[1])}
        places["feature_offset"] = shard_offset(x, self.in_.name, x.shape[2])
        return dropout(x, self.keys, rate=self.dropout, **places)

    def strength_per_expert(self, like: Float[Array, "*experts"]) -> Float[Array, "*experts"]:
        if self.keys is not None and like.ndim:
            raise NotImplementedError(
                f"the adapter {self.adapter_name!r} has dropout={self.dropout} and stands around experts, who see rows in "
                "another order: leave dropout out"
            )
        return super().strength_per_expert(like)

    def project_down(self, x: Float[Array, "*rows in"], factor: Float[Array, "..."]) -> Float[Array, "*rows rank"]:
        """factor A x."""
        inner = self.down(self.drop_inputs(x))
        return (inner * factor).astype(inner.dtype)


_BASE_SITE_OFFSET = 2**20
"""Between the sites of an adapter and of what lies under it."""


def check_dropout_rate(rate: float | int) -> float:
    """**Raises** `ValueError` for a rate of dropout that is none."""
    if not 0 <= rate < 1:
        raise ValueError(f"a dropout rate is at least 0 and less than 1, not {rate}")
    return float(rate)


def low_rank_product(down: Linear, up: Linear) -> Matrix:
    """B A, in float32."""
    return jnp.matmul(up.dense_weight, down.dense_weight, precision="highest")


def linear_from_weight(weight: Float[Array, "out in"], *, in_: Dim, out: Dim) -> Linear:
    """A Linear that has this weight, and no bias."""

    make = eqx.filter_eval_shape(Linear, *weight.shape[::-1], in_=in_, out=out, key=jax.random.key(0))
    return eqx.tree_at(lambda linear: linear.weight, make, weight)
