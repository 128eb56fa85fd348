"""What the places of a model may hold. A class is one of these, abstract, or final."""

import abc
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.parallel import Module
from zoo.shapes import HiddenStates

from .moe.routing import Routing
from .token_info import TokenInfo


class AbstractLinear(Module):
    """What stands where a matrix is multiplied: a `Linear`, or what an adapter or a quantized form puts there."""

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        """W x + b."""

    @abc.abstractmethod
    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        """Wᵀ x."""

    @property
    @abc.abstractmethod
    def out_size(self) -> int:
        """How many outputs live here: on a device's share, its share."""

    @property
    def dense_weight(self) -> Float[Array, "out in"]:
        """W, in float32: of a device's share, its share."""
        raise NotImplementedError(f"a {type(self).__name__} has no matrix of its own")

    @property
    def dense_bias(self) -> Float[Array, "out"] | None:
        """b, where there is one."""
        raise NotImplementedError(f"a {type(self).__name__} has no matrix of its own, and no bias of one")

    def with_weight(self, weight: Float[Array, "out in"], bias: Float[Array, "out"] | None) -> "AbstractLinear":
        """The same with another W and b, in the dtypes that these have."""
        raise NotImplementedError(f"a {type(self).__name__} has no matrix of its own that could be exchanged")

    def with_dropout_keys(self, info: TokenInfo, site: int) -> "AbstractLinear":
        """The same with random keys, where it drops values in training: most do not. `site` tells it from the others of
        its layer."""
        return self

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        """Of a matrix an expert, stacked: W_e x + b_e, the first `sizes[0]` rows being expert 0's, the next expert 1's.

        Where the dim that it contracts is split these are a device's partial results: whoever calls sums them, with
        `reduce`, once it has added up what it can.
        """
        raise NotImplementedError(f"a {type(self).__name__} multiplies no groups of rows, as experts do")

    def per_head(self, x: Float[Array, "*rows units in"]) -> Float[Array, "*rows units unit"]:
        """Each head's part of W times a vector of its own: W_h x_h. For an `out` that counts in units."""
        raise NotImplementedError(f"a {type(self).__name__} multiplies no head by itself, as latent attention does")

    def per_head_transposed(self, x: Float[Array, "*rows units unit"]) -> Float[Array, "*rows units in"]:
        """W_hᵀ x_h of each head. For an `out` that counts in units."""
        raise NotImplementedError(f"a {type(self).__name__} multiplies no head by itself, as latent attention does")


class AbstractNorm(Module):
    """A map of vectors that keeps their scale."""

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "*rows features"]) -> Float[Array, "*rows features"]: ...


class AbstractFeedForward(Module):
    """A map of each token by itself."""

    @abc.abstractmethod
    def __call__(self, x: HiddenStates) -> HiddenStates: ...

    def routed(self, x: HiddenStates) -> tuple[HiddenStates, tuple[Routing, ...]]:
        """The same, and what a router decided on the way, where there is one."""
        return self(x), ()

    def grouped(self, x: Float[Array, "rows embed"], sizes: Int[Array, "experts"]) -> Float[Array, "rows embed"]:
        """Of experts, stacked: each row through its own, the first `sizes[0]` rows being expert 0's. Partial results,
        as those of `AbstractLinear.grouped`: to be summed over "mlp"."""
        raise NotImplementedError(f"a {type(self).__name__} takes no groups of rows, and so cannot be an expert")


class AbstractMixer(Module):
    """What lets tokens see those before them: attention, or a recurrence."""

    @abc.abstractmethod
    def __call__(self, x: HiddenStates, info: TokenInfo, state: Any = None) -> tuple[HiddenStates, Any]:
        """What each token takes from those it sees; and the state after them, where one came."""

    @abc.abstractmethod
    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        """What it remembers before the first of up to `length` tokens."""

    @property
    def rope_stable_length(self) -> int | None:
        """Up to how many tokens what it computes does not depend on how long the text is to be; None where it never
        does."""
        return None
