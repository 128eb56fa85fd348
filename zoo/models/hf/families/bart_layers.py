"""The embedding of BART's line, whose tied head has a bias, and the norm of Blenderbot's tokens."""

from typing import NoReturn

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.layers import AbstractLinear, AbstractNorm, Embedding
from zoo.layers.embedding import AbstractEmbedding
from zoo.parallel import buffer


class BiasedEmbedding(Embedding):
    """A token embedding E with logits E x + b of a tied head. The bias b is not trained: BART's `final_logits_bias`."""

    bias: Float[Array, "vocab"] = buffer()

    def __init__(self, embedding: AbstractEmbedding):
        """Take the table of this embedding, and a bias of zeros."""
        self.weight = embedding.dense_weight
        self.multiplier = embedding.multiplier
        self.bias = jnp.zeros_like(self.weight[:, 0])

    def transposed(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        logits = super().transposed(x)
        return logits + self.bias.astype(logits.dtype)

    @property
    def dense_bias(self) -> Float[Array, "vocab"]:
        return self.bias.astype(jnp.float32)

    def with_weight(
        self, weight: Float[Array, "vocab embed"], bias: Float[Array, "vocab"] | None = None
    ) -> "BiasedEmbedding":
        return eqx.tree_at(lambda embedding: embedding.weight, self, weight)


class NormProjection(AbstractLinear):
    """A norm in the place of a decoder's `embedding_projection`: of the tokens, before positions are added."""

    norm: AbstractNorm

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows in"]:
        return self.norm(x)

    def transposed(self, x: Float[Array, "*rows out"]) -> NoReturn:
        """**Raises** `NotImplementedError`: a norm is not a linear map."""
        raise NotImplementedError("a norm is not a linear map, and has no transpose")

    @property
    def out_size(self) -> NoReturn:
        """**Raises** `NotImplementedError`: a norm has the features of its input."""
        raise NotImplementedError("a norm has the features of its input")
