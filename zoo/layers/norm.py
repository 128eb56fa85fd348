"""RMSNorm and LayerNorm over the last dim, computed in float32. If it is sharded, the mean is all-reduced."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.ops.normalization import layer_norm, mean_last_dim, rms_norm
from zoo.parallel import Dim, full_precision, num_shards, reduce, stacked

from .abstract import AbstractNorm


class IdentityNorm(AbstractNorm):
    """No norm: y = x, where a layer or a model leaves one out."""

    def __call__(self, x: Float[Array, "*rows features"]) -> Float[Array, "*rows features"]:
        return x


class RMSNorm(AbstractNorm):
    """y = x / sqrt(mean(x²) + epsilon) * (offset + weight) (Zhang & Sennrich, arXiv:1910.07467, equation 4).

    `offset` is 1 for Gemma, whose weights are stored around zero.
    """

    weight: Float[Array, "features"] | None = full_precision()

    features: Dim = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)
    offset: float = eqx.field(static=True)

    def __init__(
        self,
        size: int,
        *,
        features: Dim = Dim("embed"),
        epsilon: float = 1e-6,
        offset: float = 0.0,
        scaled: bool = True,
    ):
        """`scaled`: if False, the norm has no weight."""
        self.weight = jnp.full(size, 1.0 - offset, jnp.float32) if scaled else None
        self.features = features
        self.epsilon = epsilon
        self.offset = offset

    def __call__(self, x: Float[Array, "*rows features"]) -> Float[Array, "*rows features"]:
        mean = partial(sharded_mean, self.features.name)
        return rms_norm(x, self.weight, epsilon=self.epsilon, offset=self.offset, mean=mean)


class StreamNorm(AbstractNorm):
    """RMSNorm of each of n residual streams, which are side by side, with weights of their own."""

    weight: Float[Array, "features"] = full_precision()

    features: Dim = eqx.field(static=True)
    streams: int = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)
    offset: float = eqx.field(static=True)

    def __init__(self, embed: int, streams: int, *, epsilon: float = 1e-6, offset: float = 0.0):
        """`epsilon` and `offset` are as in `RMSNorm`."""
        self.weight = jnp.full(streams * embed, 1.0 - offset, jnp.float32)
        self.features = Dim("embed")
        self.streams = streams
        self.epsilon = epsilon
        self.offset = offset

    def __call__(self, x: Float[Array, "*rows features"]) -> Float[Array, "*rows features"]:
        streams = x.reshape(*x.shape[:-1], self.streams, -1)
        weight = self.weight.reshape(self.streams, -1)
        return rms_norm(streams, weight, epsilon=self.epsilon, offset=self.offset).reshape(x.shape)


class LayerNorm(AbstractNorm):
    """y = (x - mean(x)) / sqrt(var(x) + epsilon) * (offset + weight) + bias (Ba et al., arXiv:1607.06450, equation 4).

    `offset` is 1 for Nemotron, whose weights are stored around zero.
    """

    weight: Float[Array, "features"] | None = full_precision()
    bias: Float[Array, "features"] | None = full_precision()

    features: Dim = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)
    offset: float = eqx.field(static=True)

    def __init__(
        self,
        size: int,
        *,
        features: Dim = Dim("embed"),
        epsilon: float = 1e-5,
        offset: float = 0.0,
        scaled: bool = True,
        bias: bool = True,
    ):
        """`scaled`: if False, the norm has no weight."""
        self.weight = jnp.full(size, 1.0 - offset, jnp.float32) if scaled else None
        self.bias = jnp.zeros(size, jnp.float32) if bias else None
        self.features = features
        self.epsilon = epsilon
        self.offset = offset

    def __call__(self, x: Float[Array, "*rows features"]) -> Float[Array, "*rows features"]:
        mean = partial(sharded_mean, self.features.name)
        return layer_norm(x, self.weight, self.bias, epsilon=self.epsilon, offset=self.offset, mean=mean)


class PerHeadLayerNorm(AbstractNorm):
    """A `LayerNorm` of its own for each head, without biases: QK norm of StableLM 2 12B (Bellagente et al.,
    arXiv:2402.17834; per-head norms of Dehghani et al., arXiv:2302.05442, section 2).

    Its input has all heads side by side, as a projection to heads gives them.
    """

    norms: LayerNorm = stacked("heads")

    features: Dim = eqx.field(static=True)
    """Heads, and the features of each."""
    heads: Dim = eqx.field(static=True)

    def __init__(self, size: int, *, features: Dim, epsilon: float = 1e-5):
        make = lambda _: LayerNorm(features.unit, features=Dim("head_dim"), epsilon=epsilon, bias=False)
        self.norms = jax.vmap(make)(jnp.arange(size // features.unit))
        self.features = features
        self.heads = Dim(features.name)

    def __call__(self, x: Float[Array, "*rows features"]) -> Float[Array, "*rows features"]:
        return self.norms(x.reshape(*x.shape[:-1], -1, self.features.unit)).reshape(x.shape)


def sharded_mean(dim: str, x: Float[Array, "*rows features"]) -> Float[Array, "*rows 1"]:
    """Return the mean over the last dim, `dim`, all-reduced if it is sharded."""
    shards = num_shards(x, dim)
    if shards > 1:
        return reduce(x.sum(-1, keepdims=True), over=dim) / (x.shape[-1] * shards)
    return mean_last_dim(x)
