"""Layers of Gemma 3n: alternating updates (AltUp), learned residual connections (LAuReL), and sparse gates.

AltUp has parallel residual streams, of which each layer computes one and updates all. The streams of a token are side
by side in `Hidden.x`: n embed features. `AltUpInputs` makes them of the embedding, `AltUpBlock` is a layer, and
`AltUpNorm` averages them before the head.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key

from zoo.layers import AbstractFeedForward, AbstractLinear, AbstractNorm, Dropout, Linear, TokenInfo
from zoo.layers.abstract import run_feed_forward
from zoo.layers.attention.cross_layer import CrossLayerAttention
from zoo.layers.norm import sharded_mean
from zoo.models.decoder import AbstractBlock, AbstractLayerInputs, Hidden
from zoo.models.layer_inputs import LayerHidden, LayerInputProjection, LayerInputs, require_layer_hidden
from zoo.ops.activations import gaussian_top_k
from zoo.ops.matmul import einsum_fp32_accum
from zoo.parallel import Dim, Module, named_by_class
from zoo.parallel.tokens import run_on_all_tokens
from zoo.shapes import ResidualStream, Tokens

_Streams = Float[Array, "batch tokens streams embed"]


@dataclasses.dataclass(frozen=True)
class GaussianTopK:
    """The `activation` of `zoo.ops.activations.gaussian_top_k`, so that about the fraction `sparsity` of a gate's
    features is 0 (Spark Transformer, arXiv:2506.06644; Gemma 3n, 2025).

        mlp = GatedMLP(embed, mlp, activation=GaussianTopK(0.95, jax.nn.silu), key=key)

    It reads all features of a token. Where they are sharded, their mean and variance are all-reduced over "mlp".

    **Raises** `ValueError` for a sparsity that is not between 0 and 1.
    """

    sparsity: float
    activation: Callable

    def __post_init__(self):
        if not 0 < self.sparsity < 1:
            raise ValueError(
                f"a sparsity is between 0 and 1, not {self.sparsity}: without one, use only the activation"
            )

    def __call__(self, x: Float[Array, "*rows mlp"]) -> Float[Array, "*rows mlp"]:
        return self.activation(gaussian_top_k(x, self.sparsity, mean=partial(sharded_mean, "mlp")))


class Laurel(Module):
    """y = x + norm(W_right W_left x): a residual connection with a low-rank learned part (LAuReL-LR; Menghani et al.,
    arXiv:2411.07501, section 2; with a norm in Gemma 3n, 2025)."""

    left: AbstractLinear
    right: AbstractLinear
    norm: AbstractNorm

    def __init__(self, embed: int, rank: int, norm: Callable[[], AbstractNorm], *, key: Key[Array, ""]):
        """`norm`: a factory of the norm of the learned part."""
        left_key, right_key = jax.random.split(key)
        self.left = Linear(embed, rank, in_=Dim("embed"), out=Dim("rank"), key=left_key)
        self.right = Linear(rank, embed, in_=Dim("rank"), out=Dim("embed"), key=right_key)
        self.norm = norm()

    def __call__(self, x: ResidualStream) -> ResidualStream:
        return x + self.norm(self.right(self.left(x)))


class AltUp(Module):
    """Prediction and correction of n streams x_i around a layer L, which computes the active one, a (AltUp; Baykal et
    al., arXiv:2301.13310, algorithm 1), with coefficients that depend on the token (Gemma 3n, 2025):

        m(x) = tanh(W_router norm(x) / embed)
        p_i = x_i + Σ_j P(m(x_a))_ij x_j          n x n coefficients P
        x_i = p_i + (1 + C(m(y))_i) (y - p_a)     for y = L(p_a), n coefficients C

    A corrected stream that is read again is multiplied by `output_scale`, unless `scales_output` is False.
    """

    router: AbstractLinear
    router_norm: AbstractNorm
    prediction: AbstractLinear
    correction: AbstractLinear
    output_scale: Float[Array, "embed"]

    streams: int = eqx.field(static=True)
    active: int = eqx.field(static=True)
    """Number of the stream that the layer computes."""
    scales_output: bool = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        streams: int,
        norm: Callable[[], AbstractNorm],
        *,
        active: int = 0,
        scales_output: bool = True,
        key: Key[Array, ""],
    ):
        """`norm`: a factory of the norm ahead of the router. **Raises** `ValueError` unless `active` is a stream."""
        if not 0 <= active < streams:
            raise ValueError(f"there are streams 0 to {streams - 1}, and active={active} is none of them")
        router_key, prediction_key, correction_key = jax.random.split(key, 3)
        self.router = Linear(embed, streams, in_=Dim("embed"), key=router_key)
        self.prediction = Linear(streams, streams**2, key=prediction_key)
        self.correction = Linear(streams, streams, key=correction_key)
        self.router_norm = norm()
        self.output_scale = jnp.ones(embed, jnp.float32)
        self.streams = streams
        self.active = active
        self.scales_output = scales_output

    def predict(self, streams: _Streams) -> _Streams:
        """Return the predictions p of all streams."""
        coefficients = self.prediction(self._route(streams[:, :, self.active]))
        coefficients = coefficients.reshape(*streams.shape[:2], self.streams, self.streams)
        return streams + einsum_fp32_accum("btij,btje->btie", coefficients, streams)

    def correct(self, predictions: _Streams, y: ResidualStream) -> _Streams:
        """Return the predictions, corrected by the output `y` of the layer."""
        innovation = y - predictions[:, :, self.active]
        return predictions + (1 + self.correction(self._route(y)))[..., None] * innovation[:, :, None]

    def _route(self, x: ResidualStream) -> Float[Array, "batch tokens streams"]:
        routed = self.router(self.router_norm(x) / x.shape[-1])
        return jnp.tanh(routed.astype(jnp.float32)).astype(x.dtype)


class AltUpInputs(AbstractLayerInputs):
    """Streams of the embedding x: x itself, and W_i x scaled to the root mean square of x. Inputs of each layer besides
    these are `inputs`, where tokens beyond their table have the input of token 0."""

    inputs: LayerInputs
    projections: tuple[AbstractLinear, ...]

    vocab: int = eqx.field(static=True)
    """Rows of the table of `inputs`, on all devices."""

    def __init__(
        self, vocab: int, embed: int, layers: int, width: int, *, streams: int, epsilon: float, key: Key[Array, ""]
    ):
        """Takes the arguments of `LayerInputs`, and the number of streams."""
        inputs_key, *keys = jax.random.split(key, streams)
        self.inputs = LayerInputs(vocab, embed, layers, width, epsilon=epsilon, key=inputs_key)
        self.projections = _make_projections(embed, keys)
        self.vocab = vocab

    def __call__(self, tokens: Tokens, x: ResidualStream) -> LayerHidden:
        hidden = self.inputs(jnp.where(tokens < self.vocab, tokens, 0), x)
        streams = [x, *(_match_magnitude(project(x), x) for project in self.projections)]
        return dataclasses.replace(hidden, x=jnp.concatenate(streams, axis=-1))


class AltUpNorm(AbstractNorm):
    """norm(mean of the streams), each but the first one projected and scaled to the root mean square of the first."""

    norm: AbstractNorm
    projections: tuple[AbstractLinear, ...]

    def __init__(self, embed: int, streams: int, norm: Callable[[], AbstractNorm], *, key: Key[Array, ""]):
        self.norm = norm()
        self.projections = _make_projections(embed, list(jax.random.split(key, streams - 1)))

    def __call__(self, x: Float[Array, "*rows features"]) -> Float[Array, "*rows embed"]:
        first, *others = jnp.split(x, 1 + len(self.projections), axis=-1)
        pairs = zip(self.projections, others, strict=True)
        streams = [first, *(_match_magnitude(project(other), first) for project, other in pairs)]
        return self.norm(jnp.stack(streams).mean(0))


class AltUpBlock(AbstractBlock):
    """A layer between the prediction and the correction of parallel streams (Gemma 3n, 2025):

        x = active prediction
        h = (x + post_norm(mixer(norm(x))) + laurel(norm(x))) / sqrt(2)
        y = h + post_norm(ffn(norm(h)))

    `inputs` adds what it makes of the corrected active stream and this layer's input to all streams but the first. Keys
    and values of earlier layers reach its attention.
    """

    altup: AltUp
    mixer_norm: AbstractNorm
    mixer: CrossLayerAttention = named_by_class()
    mixer_post_norm: AbstractNorm
    laurel: Laurel
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    ffn_post_norm: AbstractNorm
    dropout: Dropout
    inputs: LayerInputProjection

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        return self.mixer.init_state(batch, length, dtype)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        """**Raises** `TypeError` for hidden states without layer inputs, as from another decoder."""
        hidden = require_layer_hidden(hidden, self)
        predictions = self.altup.predict(hidden.x.reshape(*hidden.x.shape[:2], self.altup.streams, -1))
        x = predictions[:, :, self.altup.active]
        normed = self.mixer_norm(x)
        mixed, (state, shared) = run_on_all_tokens(self.mixer.mix, normed, info, state, hidden.shared)
        mixed = self.dropout(self.mixer_post_norm(mixed), info, site=0)
        x = (x + mixed + self.laurel(normed)) * 2**-0.5
        fed, routing = run_feed_forward(self.ffn, self.ffn_norm(x))
        fed = checkpoint_name(fed, "ffn_output")
        x = x + self.dropout(self.ffn_post_norm(fed), info, site=1)
        streams = self.altup.correct(predictions, x)
        active = streams[:, :, self.altup.active]
        if self.altup.scales_output:
            active = active * self.altup.output_scale
        added = self.inputs(active, hidden.take_inputs(self.inputs.width))
        streams = streams.at[:, :, 1:].add(added[:, :, None])
        decisions = hidden.decisions + routing
        hidden = dataclasses.replace(hidden.count_layer(), x=streams.reshape(hidden.x.shape), shared=shared)
        return dataclasses.replace(hidden, decisions=decisions), state


def _make_projections(embed: int, keys: list[Key[Array, ""]]) -> tuple[AbstractLinear, ...]:
    """Initialize the square matrices of all streams but the first."""
    project = partial(Linear, embed, embed, in_=Dim("embed"), out=Dim("out"))
    return tuple(project(key=key) for key in keys)


def _match_magnitude(x: Float[Array, "*rows _"], like: Float[Array, "*rows _"]) -> Float[Array, "*rows _"]:
    """Scale each token to the root mean square of the same token of `like`. Where that is 0, gradients are finite."""
    mean_square = lambda x: jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True)
    target = mean_square(like)
    is_zero = target == 0
    ratio = jnp.sqrt(jnp.where(is_zero, 1, target) / jnp.maximum(mean_square(x), 1e-5))
    return (x * jnp.where(is_zero, 0, ratio)).astype(x.dtype)
