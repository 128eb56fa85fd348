"""Attention residuals: each sublayer attends over depth, to the sums of earlier groups of layers (Kimi Team,
arXiv:2603.15031, section 3.2, "Block AttnRes").

The sums of a token are side by side in `Hidden.x`: the embedding b_0, and b_1 to b_N, one per group of layers.
`DepthInputs` begins them, `AttentionResidualBlock` is a layer, and `AttentionResidualNorm` attends to them before the
head; `make_attention_residuals` returns all three for `build_decoder`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from zoo.layers import AbstractFeedForward, AbstractMixer, AbstractNorm, Dropout, TokenInfo
from zoo.layers.abstract import run_feed_forward, run_mixer
from zoo.ops.hyper_connections import read_streams
from zoo.parallel import Module, full_precision, named_by_class
from zoo.shapes import ResidualStream, Tokens

from .decoder import AbstractBlock, AbstractLayerInputs, Hidden

_Sums = Float[Array, "*rows sums embed"]


class DepthHidden(Hidden):
    """Hidden states with the number of the next layer."""

    number: Int[Array, ""] | None = None


class DepthInputs(AbstractLayerInputs):
    """The embedding, and the sums of all groups of layers, which begin as zeros."""

    groups: int = eqx.field(static=True)

    def __call__(self, tokens: Tokens, x: ResidualStream) -> DepthHidden:
        zeros = jnp.tile(jnp.zeros_like(x), self.groups)
        return DepthHidden(jnp.concatenate([x, zeros], axis=-1), number=jnp.zeros((), jnp.int32))


class AttentionResidual(Module):
    """h = Σ_i softmax_i(w · norm(b_i)) b_i, attention over depth with one learned query w (Kimi Team, arXiv:2603.15031,
    equations 2 to 4). It begins with w = 0: the mean."""

    query: Float[Array, "embed"] = full_precision()
    norm: AbstractNorm

    def __init__(self, embed: int, norm: Callable[[], AbstractNorm], *, key: Key[Array, ""] | None = None):
        """`norm`: a factory of the norm of the keys. `key` is not used."""
        self.query = jnp.zeros(embed, jnp.float32)
        self.norm = norm()

    def __call__(self, sums: _Sums, begun: int | Int[Array, ""] | None = None) -> Float[Array, "*rows embed"]:
        """Return the input of a sublayer. `begun`: sums that have begun, all by default; the others are masked."""
        logits = self.norm(sums).astype(jnp.float32) @ self.query
        if begun is not None:
            logits = jnp.where(jnp.arange(sums.shape[-2]) < begun, logits, -jnp.inf)
        return read_streams(sums, jax.nn.softmax(logits, axis=-1))


class AttentionResidualBlock(AbstractBlock):
    """A pre-norm layer in which each sublayer reads all sums so far, and adds its output to the sum of its group of
    layers (Kimi Team, arXiv:2603.15031, equation 6):

        b_n = b_n + mixer(norm(attention over b_0 ... b_n))
        b_n = b_n + ffn(norm(attention over b_0 ... b_n))

    The first sublayer of a group does not read its own sum, which is empty. Each layer passes on N + 1 streams, which
    rematerialization saves.
    """

    mixer_residual: AttentionResidual
    mixer_norm: AbstractNorm
    mixer: AbstractMixer = named_by_class()
    ffn_residual: AttentionResidual
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    dropout: Dropout

    group_size: int = eqx.field(static=True)
    """Layers of a group."""

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        return self.mixer.init_state(batch, length, dtype)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        """**Raises** `TypeError` for hidden states without the number of the layer, as from another decoder."""
        number = getattr(hidden, "number", None)
        if number is None:
            raise TypeError(
                f"{type(self).__name__} counts layers, which {type(hidden).__name__} does not: build the decoder with "
                "make_attention_residuals"
            )
        sums = hidden.x.reshape(*hidden.x.shape[:-1], -1, self.mixer_residual.query.shape[-1])
        group = 1 + number // self.group_size
        read = self.mixer_residual(sums, group + (number % self.group_size > 0))
        mixed, state = run_mixer(self.mixer, self.mixer_norm(read), info, state)
        sums = _add(sums, self.dropout(mixed, info, site=0), group)
        fed, routing = run_feed_forward(self.ffn, self.ffn_norm(self.ffn_residual(sums, group + 1)))
        fed = checkpoint_name(fed, "ffn_output")
        sums = _add(sums, self.dropout(fed, info, site=1), group)
        new = dataclasses.replace(cast(DepthHidden, hidden), x=sums.reshape(hidden.x.shape), number=number + 1)
        return dataclasses.replace(new, decisions=hidden.decisions + routing), state


class AttentionResidualNorm(AbstractNorm):
    """norm(attention over b_0 ... b_N): the input of the head."""

    norm: AbstractNorm
    residual: AttentionResidual

    def __init__(self, embed: int, norm: Callable[[], AbstractNorm]):
        """`norm`: a factory of both norms."""
        self.norm = norm()
        self.residual = AttentionResidual(embed, norm)

    def __call__(self, x: Float[Array, "*rows features"]) -> Float[Array, "*rows embed"]:
        return self.norm(self.residual(x.reshape(*x.shape[:-1], -1, self.residual.query.shape[-1])))


def make_attention_residuals(
    embed: int, layers: int, norm: Callable[[], AbstractNorm], *, group_size: int
) -> dict[str, Any]:
    """Return the arguments of `build_decoder` that wire its `layers` with attention residuals.

        build_decoder(layers=layers, norm=norm, **make_attention_residuals(64, len(layers), norm, group_size=3), ...)

    - `layers`: layers that run, each of a mixer and a feed-forward layer.
    - `norm`: a factory of the final norm and of the norms of keys.
    - `group_size`: layers whose outputs are summed; the last group may have fewer. The paper has about eight groups.

    **Raises** `ValueError` for no layers in a model or in a group.
    """
    if layers < 1 or group_size < 1:
        raise ValueError(f"a model and a group have at least one layer, not {layers=}, {group_size=}")
    residual = partial(AttentionResidual, embed, norm)
    return {
        "block": partial(AttentionResidualBlock, group_size=group_size),
        "parts": {"mixer_residual": residual, "ffn_residual": residual},
        "layer_inputs": lambda key: DepthInputs(-(-layers // group_size)),
        "final_norm": partial(AttentionResidualNorm, embed, norm),
    }


def _add(sums: _Sums, output: Float[Array, "*rows embed"], group: Int[Array, ""]) -> _Sums:
    """Add the output of a sublayer to the sum of a group."""
    is_own = jnp.arange(sums.shape[-2]) == group
    return sums + jnp.where(is_own[:, None], output[..., None, :], 0)
