"""Lower bounds of HGRN2's forget gates, which are learned for all layers together and grow with depth."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from zoo.layers import HGRN2, AbstractFeedForward, AbstractMixer, AbstractNorm, Dropout, TokenInfo
from zoo.layers.abstract import run_feed_forward, run_mixer
from zoo.models.decoder import AbstractLayerInputs, AbstractMixerBlock, Hidden
from zoo.parallel import Dim, named_by_class
from zoo.shapes import ResidualStream, Tokens


class BoundedHidden(Hidden):
    """Hidden states with the lower bounds of all layers."""

    constant_fields = ("bounds",)

    bounds: Float[Array, "layers features"] | None = None
    number: Int[Array, ""] | None = None
    """Number of the next layer."""


class LowerBounds(AbstractLayerInputs):
    """Layer n has the bounds p_1 + ... + p_n, and the first, layer 0, none: p = softmax(weight) over the layers (Qin et
    al., arXiv:2404.07904, section 2.2)."""

    weight: Float[Array, "layers features"]

    features: Dim = eqx.field(static=True)

    def __init__(self, layers: int, features: int, head_dim: int, *, key: Key[Array, ""]):
        self.weight = jnp.zeros((layers, features), jnp.float32)
        self.features = Dim("heads", head_dim)

    def __call__(self, tokens: Tokens, x: ResidualStream) -> BoundedHidden:
        shares = jax.nn.softmax(self.weight.astype(jnp.float32), axis=0)
        # The first bound is 0 itself and not a difference, which a program may round in two ways.
        bounds = jnp.pad(shares[1:].cumsum(0), ((1, 0), (0, 0)))
        return BoundedHidden(x, bounds=bounds, number=jnp.zeros((), jnp.int32))


class BoundedBlock(AbstractMixerBlock):
    """The pre-norm layer `zoo.models.Block` of HGRN2, with the lower bounds that the model has for this layer."""

    mixer_norm: AbstractNorm
    mixer: AbstractMixer = named_by_class()
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    dropout: Dropout

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        """**Raises** `TypeError` for hidden states without bounds, as from another decoder."""
        if not isinstance(hidden, BoundedHidden) or hidden.bounds is None or hidden.number is None:
            raise TypeError(f"{type(hidden).__name__} has no lower bounds of the layers: run the layers in their model")
        mixer = self.mixer
        if isinstance(mixer, HGRN2):
            bounds = hidden.bounds[hidden.number]
            mixer = eqx.tree_at(lambda mixer: mixer.bounds, mixer, bounds, is_leaf=lambda x: x is None)
        mixed, state = run_mixer(mixer, self.mixer_norm(hidden.x), info, state)
        layer = dataclasses.replace(hidden, number=hidden.number + 1)
        layer = layer.add_residual(self.dropout(mixed, info, site=0))
        fed, routing = run_feed_forward(self.ffn, self.ffn_norm(layer.x))
        fed = checkpoint_name(fed, "ffn_output")
        return layer.add_residual(self.dropout(fed, info, site=1), routing), state
