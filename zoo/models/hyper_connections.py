"""Hyper-connections: a layer reads and writes several residual streams, which it mixes (mHC, arXiv:2512.24880).

The streams of a token are side by side in `Hidden.x`: n embed features. `HyperConnectionInputs` makes them of the
embedding, `HyperConnectionBlock` is a layer, and `HyperConnectionNorm` sums them before the head;
`make_hyper_connections` returns all three for `build_decoder`.
"""

import abc
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key

from zoo.layers import (
    AbstractFeedForward,
    AbstractLinear,
    AbstractMixer,
    AbstractNorm,
    Dropout,
    Linear,
    TokenInfo,
)
from zoo.layers.abstract import run_feed_forward, run_mixer
from zoo.ops.hyper_connections import StreamWeights, make_stream_weights, read_streams, write_streams
from zoo.ops.normalization import rms_norm
from zoo.parallel import Dim, Module, full_precision, named_by_class
from zoo.shapes import ResidualStream, Tokens

from .decoder import AbstractLayerInputs, AbstractMixerBlock, Hidden
from .layer_inputs import TokenHidden, has_hash_router, route_by_token

SideBySide = Float[Array, "*rows features"]
"""Streams of each token, side by side: n embed features."""

_EPSILON = 1e-6
_FIRST_SCALE = 0.01
"""The weights begin almost equal for all tokens."""
_KEPT_LOGIT = 4.0
"""Logit of the diagonal of `comb`: each of four streams begins with 0.95 of itself."""


class AbstractStreamConnection(Module):
    """Reading and writing of n streams of the residual by one sublayer."""

    @abc.abstractmethod
    def read(self, x: SideBySide) -> tuple[Float[Array, "*rows embed"], Any]:
        """Return the input of the sublayer, and the weights that `write` takes."""

    @abc.abstractmethod
    def write(self, x: SideBySide, output: Float[Array, "*rows embed"], weights: Any) -> SideBySide:
        """Return the streams after a sublayer with this output."""


class HyperConnection(AbstractStreamConnection):
    """The weights of one sublayer on n streams X (Xie et al., arXiv:2512.24880, equations 7 to 9):

        logits = W norm(X)          all n embed features, normalized without weights
        pre, post, comb = make_stream_weights(logits, scale, base)

    and the two sums that `zoo.ops.hyper_connections` has. Tokens do not depend on one another.
    """

    projection: AbstractLinear = full_precision()
    scale: Float[Array, "3"] = full_precision()
    """Factors of the logits of `pre`, `post` and `comb`."""
    base: Float[Array, "out"] = full_precision()

    streams: int = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)
    norm_epsilon: float = eqx.field(static=True)
    iterations: int = eqx.field(static=True)
    """Iterations of `zoo.ops.hyper_connections.sinkhorn`."""

    def __init__(
        self,
        embed: int,
        streams: int,
        *,
        epsilon: float = _EPSILON,
        norm_epsilon: float = _EPSILON,
        iterations: int = 20,
        key: Key[Array, ""],
    ):
        """Initialize `scale` with 0.01. At first `pre` is close to 1/2, `post` to 1 and `comb` to the identity.
        `epsilon` is of the weights, and `norm_epsilon` of the norm of all streams.

        **Raises** `ValueError` unless there is a stream and an iteration.
        """
        check_streams(streams)
        if iterations < 1:
            raise ValueError(f"comb is normalized once or more, not iterations={iterations}")
        size = streams * (2 + streams)
        self.projection = Linear(streams * embed, size, in_=Dim("embed"), key=key)
        self.scale = jnp.full(3, _FIRST_SCALE, jnp.float32)
        kept = _KEPT_LOGIT * jnp.eye(streams, dtype=jnp.float32)
        self.base = jnp.concatenate([jnp.zeros(2 * streams, jnp.float32), kept.reshape(-1)])
        self.streams = streams
        self.epsilon = epsilon
        self.norm_epsilon = norm_epsilon
        self.iterations = iterations

    def read(self, x: SideBySide) -> tuple[Float[Array, "*rows embed"], StreamWeights]:
        logits = self.projection(rms_norm(x.astype(jnp.float32), epsilon=self.norm_epsilon))
        options = {"iterations": self.iterations, "epsilon": self.epsilon}
        weights = make_stream_weights(logits, self.scale, self.base, **options)
        return read_streams(split_streams(x, self.streams), weights.pre), weights

    def write(self, x: SideBySide, output: Float[Array, "*rows embed"], weights: StreamWeights) -> SideBySide:
        return write_streams(split_streams(x, self.streams), output, weights).reshape(x.shape)


class IndependentHyperConnection(AbstractStreamConnection):
    """The weights of one sublayer on n streams X that do not mix (iHC of Hy4, Tencent, 2026):

        pre = sigmoid(scale_0 W norm(X) + base) + epsilon
        post = magnitude sigmoid(scale_1 W norm(X) + base) + epsilon
        X_j = X_j + post_j layer(Σ_i pre_i X_i)

    In float32, with the norm of `HyperConnection`.
    """

    projection: AbstractLinear = full_precision()
    scale: Float[Array, "2"] = full_precision()
    """Factors of the logits of `pre` and `post`."""
    base: Float[Array, "out"] = full_precision()

    streams: int = eqx.field(static=True)
    magnitude: float = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)
    norm_epsilon: float = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        streams: int,
        *,
        magnitude: float = 2.0,
        epsilon: float = _EPSILON,
        norm_epsilon: float = _EPSILON,
        key: Key[Array, ""],
    ):
        """Initialize `scale` with 0.01, and `base` to begin with the mean of the streams and `post` of magnitude / 2.

        **Raises** `ValueError` unless there is a stream.
        """
        check_streams(streams)
        self.projection = Linear(streams * embed, 2 * streams, in_=Dim("embed"), key=key)
        self.scale = jnp.full(2, _FIRST_SCALE, jnp.float32)
        self.base = jnp.zeros(2 * streams, jnp.float32).at[:streams].set(-jnp.log(max(streams - 1.0, 1.0)))
        self.streams = streams
        self.magnitude = magnitude
        self.epsilon = epsilon
        self.norm_epsilon = norm_epsilon

    def read(self, x: SideBySide) -> tuple[Float[Array, "*rows embed"], Float[Array, "*rows streams"]]:
        logits = self.projection(rms_norm(x.astype(jnp.float32), epsilon=self.norm_epsilon))
        weights = jax.nn.sigmoid(jnp.repeat(self.scale, self.streams) * logits + self.base)
        pre, post = jnp.split(weights, 2, axis=-1)
        return read_streams(split_streams(x, self.streams), pre + self.epsilon), self.magnitude * post + self.epsilon

    def write(
        self, x: SideBySide, output: Float[Array, "*rows embed"], post: Float[Array, "*rows streams"]
    ) -> SideBySide:
        added = post[..., None] * output[..., None, :].astype(jnp.float32)
        return (x.astype(jnp.float32) + added.reshape(x.shape)).astype(x.dtype)


class HyperConnectionBlock(AbstractMixerBlock):
    """A pre-norm layer of any mixer and any feed-forward layer, each on streams X of the residual (mHC, Xie et al.,
    arXiv:2512.24880, equation 3):

        X = combᵀ X + post ⊗ mixer(norm(pre · X))
        X = combᵀ X + post ⊗ ffn(norm(pre · X))

    here with `HyperConnection`s, whose weights depend on the token. Other connections read and write the streams
    otherwise. Rematerialization saves the n streams of a layer, and computes the weights again.
    """

    mixer_connection: AbstractStreamConnection
    mixer_norm: AbstractNorm
    mixer: AbstractMixer = named_by_class()
    ffn_connection: AbstractStreamConnection
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    dropout: Dropout

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        read, weights = self.mixer_connection.read(hidden.x)
        mixed, state = run_mixer(self.mixer, self.mixer_norm(read), info, state)
        x = self.mixer_connection.write(hidden.x, self.dropout(mixed, info, site=0), weights)
        read, weights = self.ffn_connection.read(x)
        fed, routing = run_feed_forward(route_by_token(self.ffn, hidden), self.ffn_norm(read))
        if has_hash_router(self.ffn):
            routing = ()
        fed = checkpoint_name(fed, "ffn_output")
        x = self.ffn_connection.write(x, self.dropout(fed, info, site=1), weights)
        return dataclasses.replace(hidden, x=x, decisions=hidden.decisions + routing), state


class HyperConnectionInputs(AbstractLayerInputs):
    """Streams that begin as copies of the embedding."""

    streams: int = eqx.field(static=True)
    keeps_tokens: bool = eqx.field(static=True, default=False)
    """True to hand the ids of the tokens on to every layer, for a `zoo.layers.HashRouter` or an `NGramBlock`."""

    def __call__(self, tokens: Tokens, x: ResidualStream) -> Hidden:
        streams = jnp.tile(x, self.streams)
        return TokenHidden(streams, tokens=tokens) if self.keeps_tokens else Hidden(streams)


class HyperConnectionNorm(AbstractNorm):
    """norm(Σ_i w_i X_i) with w = sigmoid(scale W norm'(X) + base) + epsilon: the sum of n streams before the head, as
    in DeepSeek-V4 (2026). norm' is as in `HyperConnection`."""

    norm: AbstractNorm
    projection: AbstractLinear = full_precision()
    scale: Float[Array, "1"] = full_precision()
    base: Float[Array, "out"] = full_precision()

    epsilon: float = eqx.field(static=True)
    norm_epsilon: float = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        streams: int,
        norm: Callable[[], AbstractNorm],
        *,
        epsilon: float = _EPSILON,
        norm_epsilon: float = _EPSILON,
        key: Key[Array, ""],
    ):
        """`norm`: a factory of the norm of the sum. **Raises** `ValueError` unless there is a stream."""
        check_streams(streams)
        self.norm = norm()
        self.projection = Linear(streams * embed, streams, in_=Dim("embed"), key=key)
        self.scale = jnp.full(1, _FIRST_SCALE, jnp.float32)
        self.base = jnp.zeros(streams, jnp.float32)
        self.epsilon = epsilon
        self.norm_epsilon = norm_epsilon

    def __call__(self, x: SideBySide) -> Float[Array, "*rows embed"]:
        logits = self.projection(rms_norm(x.astype(jnp.float32), epsilon=self.norm_epsilon))
        weights = jax.nn.sigmoid(self.scale * logits + self.base) + self.epsilon
        return self.norm(read_streams(split_streams(x, weights.shape[-1]), weights))


def make_hyper_connections(
    embed: int,
    streams: int,
    norm: Callable[[], AbstractNorm],
    *,
    epsilon: float = _EPSILON,
    norm_epsilon: float = _EPSILON,
    iterations: int = 20,
    keeps_tokens: bool = False,
    key: Key[Array, ""],
) -> dict[str, Any]:
    """Return the arguments of `build_decoder` that wire its layers with hyper-connections.

        build_decoder(embed=embed, norm=norm, **make_hyper_connections(embed, 4, norm, key=key), ...)

    - `norm`: a factory of the final norm.
    - `epsilon`, `norm_epsilon`, `iterations`: of `HyperConnection`.
    - `keeps_tokens`: hand the ids of the tokens on to every layer, for mixtures with a `zoo.layers.HashRouter`.

    **Raises** `ValueError` unless there is a stream.
    """
    check_streams(streams)
    epsilons = {"epsilon": epsilon, "norm_epsilon": norm_epsilon}
    connection = partial(HyperConnection, embed, streams, **epsilons, iterations=iterations)
    return {
        "block": HyperConnectionBlock,
        "parts": {"mixer_connection": connection, "ffn_connection": connection},
        "layer_inputs": lambda key: HyperConnectionInputs(streams, keeps_tokens),
        "final_norm": partial(HyperConnectionNorm, embed, streams, norm, **epsilons, key=key),
    }


def split_streams(x: SideBySide, streams: int) -> Float[Array, "*rows streams embed"]:
    """Return the streams along a dim of their own."""
    return x.reshape(*x.shape[:-1], streams, -1)


def check_streams(streams: int) -> None:
    """**Raises** `ValueError` unless there is a stream."""
    if streams < 1:
        raise ValueError(f"a layer has one residual stream or more, not streams={streams}")
