"""Layers of Zamba: a Transformer layer that several Mamba layers share, and Mamba with heads."""

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.layers import (
    AbstractLinear,
    AbstractMixer,
    AbstractNorm,
    Attention,
    GatedMLP,
    Linear,
    ShortConvolution,
    TokenInfo,
)
from zoo.layers.abstract import run_feed_forward, run_mixer
from zoo.layers.convolution import ConvState
from zoo.layers.recurrent.common import LowRank, inverse_softplus, sample_log_uniform
from zoo.layers.recurrent.context import RecurrenceContext
from zoo.models.blocks import MixerBlock
from zoo.models.decoder import AbstractBlock, Hidden, SharedModule
from zoo.models.layer_inputs import EmbeddedHidden
from zoo.ops.recurrence.mamba import SELECTIVE_SCAN, selective_scan
from zoo.parallel import Dim, Module, full_precision, implementation_option, named_by_class, no_weight_decay, stacked
from zoo.parallel.fields import per_use
from zoo.shapes import HiddenStates, ResidualStream

_Module = TypeVar("_Module")

_EMBED = Dim("embed")
_MLP = Dim("mlp")
_RANK = Dim("rank")


class SharedTransformer(Module):
    """ffn(norm(mixer(norm([x, e])))), of hidden states x and the embedding e side by side, without residuals (Zamba,
    Glorioso et al., arXiv:2405.16712, section 2)."""

    mixer_norm: AbstractNorm
    mixer: Attention = named_by_class()
    ffn_norm: AbstractNorm
    ffn: GatedMLP = named_by_class()

    def __init__(
        self,
        embed: int,
        mixer: Callable[..., Attention],
        ffn: Callable[..., GatedMLP],
        norm: Callable[[int], AbstractNorm],
        key: Key[Array, ""],
    ):
        """`mixer` and `ffn` are factories, called with `key=`, and `norm` is one, called with a size."""
        mixer_key, ffn_key = jax.random.split(key)
        self.mixer_norm = norm(2 * embed)
        self.mixer = mixer(key=mixer_key)
        self.ffn_norm = norm(embed)
        self.ffn = ffn(key=ffn_key)

    def __call__(
        self, x: ResidualStream, embedded: ResidualStream, info: TokenInfo, state: Any
    ) -> tuple[ResidualStream, Any]:
        both = jnp.concatenate([x, embedded], axis=-1)
        mixed, state = run_mixer(self.mixer, self.mixer_norm(both), info, state)
        fed, _ = run_feed_forward(self.ffn, self.ffn_norm(mixed))
        return fed, state


class UpdatedLinear(AbstractLinear):
    """W x + U_up U_down x: a shared matrix with the low-rank update of one call."""

    base: AbstractLinear
    down: AbstractLinear
    up: AbstractLinear

    @property
    def out_size(self) -> int:
        return self.base.out_size

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        return self.base(x) + self.up(self.down(x))

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        return self.base.transposed(x) + self.down.transposed(self.up.transposed(x))


class LowRankUpdates(Module):
    """Low-rank updates of a shared Transformer layer in one of its calls (Zamba 2, Glorioso et al., arXiv:2411.15242,
    section 2): of gate and up projection, which share U_down, and optionally of queries, keys and values."""

    query: LowRank | None
    key: LowRank | None
    value: LowRank | None
    down: AbstractLinear
    gate: AbstractLinear
    up: AbstractLinear

    def __init__(self, shared: SharedTransformer, rank: int, *, attention: bool, key: Key[Array, ""]):
        """`shared`: the layer that is updated, or its shapes. `attention`: update queries, keys and values, too."""
        keys = jax.random.split(key, 6)
        mixer = shared.mixer
        embed = shared.mixer.out.out_size
        self.query = None
        self.key = None
        self.value = None
        if attention:
            make = partial(LowRank, 2 * embed, rank=rank)
            self.query = make(mixer.query.out_size, out=Dim("heads", mixer.head_dim), key=keys[0])
            self.key = make(mixer.key.out_size, out=Dim("kv_heads", mixer.head_dim), key=keys[1])
            self.value = make(mixer.value.out_size, out=Dim("kv_heads", mixer.head_dim), key=keys[2])
        self.down = Linear(embed, rank, in_=_EMBED, out=_RANK, key=keys[3])
        self.gate, self.up = (Linear(rank, shared.ffn.gate.out_size, in_=_RANK, out=_MLP, key=key) for key in keys[4:6])

    def add_to(self, shared: SharedTransformer) -> SharedTransformer:
        """Return the layer with its matrices updated."""
        pairs = {"gate": (self.down, self.gate), "up": (self.down, self.up)}
        ffn = _update_linears(shared.ffn, pairs)
        updates = {"query": self.query, "key": self.key, "value": self.value}
        mixer = _update_linears(shared.mixer, {name: (x.down, x.up) for name, x in updates.items() if x is not None})
        return eqx.tree_at(lambda shared: (shared.mixer, shared.ffn), shared, (mixer, ffn))


def _update_linears(module: _Module, pairs: Mapping[str, tuple[AbstractLinear, AbstractLinear]]) -> _Module:
    """Return a module with the low-rank update of each named matrix added to it."""
    for name, (down, up) in pairs.items():
        updated = UpdatedLinear(getattr(module, name), down, up)
        module = eqx.tree_at(attrgetter(name), module, updated)
    return module


class SharingBlock(AbstractBlock):
    """x + mixer(norm(x + W shared([x, embedding]))): a layer that first calls a Transformer layer which it shares with
    others. The output of this layer reaches the mixer, and not the residual stream (arXiv:2405.16712, section 2).

    Its state is the KV cache of this call, and the state of the mixer.
    """

    shared: SharedTransformer | SharedModule
    updates: LowRankUpdates | None = per_use()
    linear: AbstractLinear
    layer: MixerBlock

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> tuple[Any, Any]:
        cache = self._get_shared().mixer.init_state(batch, length, dtype)
        return cache, self.layer.init_state(batch, length, dtype)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        """**Raises** `TypeError` for hidden states without the embedding, as from another decoder, and outside of the
        stack that has the shared layer."""
        if not isinstance(hidden, EmbeddedHidden) or hidden.embedded is None:
            raise TypeError(
                f"{type(self).__name__} reads the embedding again, which {type(hidden).__name__} has not: run the "
                "layers in their model, or begin with the EmbeddedHidden that model.embed(tokens, info) returns"
            )
        cache, mixer_state = (None, None) if state is None else state
        shared = self._get_shared()
        if self.updates is not None:
            shared = self.updates.add_to(shared)
        fed, cache = shared(hidden.x, hidden.embedded, info, cache)
        x = self.layer.mixer_norm(hidden.x + self.linear(fed))
        mixed, mixer_state = run_mixer(self.layer.mixer, x, info, mixer_state)
        layer = hidden.add_residual(self.layer.dropout(mixed, info, site=0))
        return layer, None if state is None else (cache, mixer_state)

    def _get_shared(self) -> SharedTransformer:
        if isinstance(self.shared, SharedModule):
            raise TypeError("the layer that this block shares is in Stack.shared: run the block in its stack")
        return self.shared


class MultiHeadMambaState(Module):
    """Recurrent state: the SSM state of each channel, in float32, and the convolution state."""

    ssm_state: Float[Array, "batch heads head_dim state"]
    conv_state: ConvState


class MambaHead(Module):
    """The selective scan of one head: `zoo.layers.Mamba` between its convolution and its gate."""

    dt_down: AbstractLinear
    B: AbstractLinear
    C: AbstractLinear
    dt_up: AbstractLinear
    dt_bias: Float[Array, "head_dim"] = full_precision()
    A_log: Float[Array, "head_dim state"] = no_weight_decay(full_precision=True)
    D: Float[Array, "head_dim"] = full_precision()

    def __init__(self, head_dim: int, state_dim: int, rank: int, *, key: Key[Array, ""]):
        keys = jax.random.split(key, 5)
        channels = Dim("head_dim")
        self.dt_down = Linear(head_dim, rank, in_=channels, out=_RANK, key=keys[0])
        self.B, self.C = (Linear(head_dim, state_dim, in_=channels, out=Dim("state"), key=key) for key in keys[1:3])
        self.dt_up = Linear(rank, head_dim, in_=_RANK, out=channels, scale=3**-0.5, key=keys[3])
        self.dt_bias = inverse_softplus(sample_log_uniform(keys[4], head_dim, 1e-3, 1e-1))
        self.A_log = jnp.broadcast_to(jnp.log1p(jnp.arange(state_dim, dtype=jnp.float32)), (head_dim, state_dim))
        self.D = jnp.ones(head_dim, jnp.float32)

    def __call__(
        self, x: Float[Array, "batch seq head_dim"], state: Float[Array, "batch head_dim state"] | None, context: Any
    ) -> tuple[Float[Array, "batch seq head_dim"], Float[Array, "batch head_dim state"]]:
        dt = self.dt_up(self.dt_down(x)).astype(jnp.float32) + self.dt_bias
        return selective_scan(
            x,
            context.mask_padding(jax.nn.softplus(dt)),
            -jnp.exp(self.A_log.astype(jnp.float32)),
            self.B(x),
            self.C(x),
            self.D,
            state=context.initial_state(state),
            segment_ids=context.segment_ids,
            implementation=context.implementation,
        )


class MultiHeadMamba(AbstractMixer):
    """`zoo.layers.Mamba` whose channels are in heads: each head has B, C and dt of its own channels (Zamba,
    arXiv:2405.16712).

        x = silu(conv(W_x u)),    y = W_out (scan_h(x_h) for each head h * silu(W_gate u))

    Heads are sharded over `tensor`, and nothing but W_out is all-reduced.
    """

    shards_sequence = True

    gate: AbstractLinear
    x: AbstractLinear
    convolution: ShortConvolution
    heads: MambaHead = stacked("heads")
    out: AbstractLinear

    head_dim: int = eqx.field(static=True)
    implementation: str = implementation_option(SELECTIVE_SCAN)

    def __init__(
        self,
        embed: int,
        heads: int,
        head_dim: int,
        *,
        state_dim: int = 16,
        rank: int | None = None,
        conv_width: int = 4,
        bias: bool = False,
        conv_bias: bool = True,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """Arguments are as for `zoo.layers.Mamba`. `rank` is `embed / 16` rounded up by default, in each head."""
        keys = jax.random.split(key, 5)
        inner = heads * head_dim
        if rank is None:
            rank = -(-embed // 16)
        channels = Dim("heads", head_dim)
        self.gate, self.x = (Linear(embed, inner, in_=_EMBED, out=channels, bias=bias, key=key) for key in keys[:2])
        self.convolution = ShortConvolution(inner, conv_width, features=channels, bias=conv_bias, key=keys[2])
        make_head = lambda key: MambaHead(head_dim, state_dim, rank, key=key)
        self.heads = eqx.filter_vmap(make_head)(jax.random.split(keys[3], heads))
        self.out = Linear(inner, embed, in_=channels, out=_EMBED, bias=bias, scale=out_scale, key=keys[4])
        self.head_dim = head_dim
        self.implementation = implementation

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> MultiHeadMambaState:
        ssm_state = jnp.zeros((batch, *self.heads.A_log.shape), jnp.float32)
        return MultiHeadMambaState(ssm_state, self.convolution.init_state(batch, dtype))

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: MultiHeadMambaState | None = None
    ) -> tuple[ResidualStream, MultiHeadMambaState | None]:
        """With a `state`, tokens continue the sequence that it summarizes."""
        context = RecurrenceContext.from_info(x, info, state, self.implementation)
        conv_state = None if state is None else state.conv_state
        ssm_state = None if state is None else state.ssm_state
        convolved, conv_state = self.convolution(self.x(x), context, conv_state)
        inputs = jax.nn.silu(convolved).reshape(*x.shape[:2], -1, self.head_dim)
        scan_head = lambda head, x, state: head(x, state, context)
        axes = (eqx.if_array(0), 2, None if ssm_state is None else 1)
        y, ssm_state = eqx.filter_vmap(scan_head, in_axes=axes, out_axes=(2, 1))(self.heads, inputs, ssm_state)
        y = self.out(y.reshape(*y.shape[:2], -1) * jax.nn.silu(self.gate(x)))
        if conv_state is None:
            return y, None
        return y, MultiHeadMambaState(ssm_state, conv_state)
