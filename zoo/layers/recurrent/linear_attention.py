"""Linear attention, retention, Lightning attention and gated linear attention (GLA). The recurrences are in
`zoo.ops.recurrence.linear_attention`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.recurrence.gated_linear import GATED_LINEAR
from zoo.ops.recurrence.linear_attention import (
    gla,
    lightning_slopes,
    linear_attention,
    normalized_linear_attention,
    retention_log_decays,
    simple_gla,
)
from zoo.ops.rotary import Rotary, apply_rotary
from zoo.parallel import Dim, buffer, implementation_option
from zoo.shapes import HeadVectors, HiddenStates, Values

from ..abstract import AbstractLinear, AbstractNorm
from ..kv_cache import require_positions
from ..linear import Linear, resolve_head_dim
from ..norm import RMSNorm
from ..rotary import compute_cos_sin, find_length_dependent_scaling
from .base import AbstractRecurrence
from .common import (
    LowRank,
    OutputGate,
    QKVProjections,
    RecurrentState,
    elu_plus_one,
    head_norm_factory,
    local_heads,
)
from .context import RecurrenceContext


class LinearAttention(AbstractRecurrence):
    """y = W_out [phi(q)ᵀ S / phi(q)ᵀ z] with S = sum of phi(k) vᵀ and z = sum of phi(k), over the tokens so far
    (Katharopoulos et al., arXiv:2006.16236, section 3). With `normalized=False`, y = W_out [phi(q)ᵀ S head_dim **
    -0.5]. Heads are sharded over `tensor`.

    A learned feature map is the product of two linear maps of a head, of queries and of keys each.
    """

    projections: QKVProjections
    readout: OutputGate
    query_maps: tuple[AbstractLinear, ...] = ()
    """Factors of a learned feature map, and `key_maps` of keys; () for `feature_map`."""
    key_maps: tuple[AbstractLinear, ...] = ()

    feature_map: Callable | None = eqx.field(static=True)
    normalized: bool = eqx.field(static=True)
    divides: tuple[bool, bool] = eqx.field(static=True)
    implementation: str = implementation_option(GATED_LINEAR)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        kv_heads: int | None = None,
        feature_map: Callable | None = elu_plus_one,
        normalized: bool = True,
        divides: tuple[bool, bool] = (False, False),
        norm: Callable[[], AbstractNorm] | None = None,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `head_dim`: `embed / heads` by default. `value_dim`: `head_dim` by default. `kv_heads`: `heads` by default.
        - `feature_map`: elementwise, and positive if `normalized`; None for a learned one.
        - `divides`: True to divide the features of queries, or of keys, by their sum. `norm`: factory of a norm of
          each head's output.
        """
        size = resolve_head_dim(embed, heads, head_dim)
        value_size = value_dim or size
        input_key, out_key = jax.random.split(key)
        self.projections = QKVProjections(embed, heads, size, value_size, kv_heads=kv_heads, key=input_key)
        self.readout = OutputGate(embed, heads, value_size, norm=norm, out_scale=out_scale, key=out_key)
        if feature_map is None:
            dims = {"in_": Dim("key_dim"), "out": Dim("features"), "bias": True}
            maps = tuple(Linear(size, size, **dims, key=map_key) for map_key in jax.random.split(input_key, 4))
            self.query_maps = maps[:2]
            self.key_maps = maps[2:]
        self.divides = divides
        self.feature_map = feature_map
        self.normalized = normalized
        self.implementation = implementation

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> RecurrentState:
        return self.projections.init_state(batch, self.projections.value_dim + self.normalized, dtype)

    def recur(self, x: HiddenStates, context: RecurrenceContext) -> tuple[HeadVectors, RecurrentState]:
        query, key, value, _ = self.projections(x, context, None)
        query = self._map(query, self.query_maps, self.divides[0])
        key = context.mask_padding(self._map(key, self.key_maps, self.divides[1]))
        attend = normalized_linear_attention if self.normalized else linear_attention
        mixed, matrix = attend(query, key, value, **context.options())
        return mixed, RecurrentState(matrix)

    def _map(self, x: HeadVectors, maps: tuple[AbstractLinear, ...], divides: bool) -> HeadVectors:
        """Return the features of queries or keys."""
        if self.feature_map is None:
            x = maps[0](x) * maps[1](x)
        else:
            x = self.feature_map(x)
        return x / (x.sum(-1, keepdims=True) + 1e-4) if divides else x


class Retention(AbstractRecurrence):
    """y = W_out [silu(W_gate x) * norm(S_tᵀ q_t)] with S_t = gamma_h S_{t-1} + k_t v_tᵀ, with RoPE on queries and
    keys and fixed decays gamma_h = 1 - 2 ** (-5 - h) (RetNet, Sun et al., arXiv:2307.08621, section 2). Heads are
    sharded over `tensor`."""

    projections: QKVProjections
    readout: OutputGate

    rotary: Rotary | None = eqx.field(static=True)
    feature_map: Callable | None = eqx.field(static=True)
    implementation: str = implementation_option(GATED_LINEAR)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        kv_heads: int | None = None,
        rotary: Rotary | None = None,
        feature_map: Callable | None = None,
        gate: bool = True,
        norm: Callable[[], AbstractNorm] | None = None,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `key_dim`: `embed / heads` by default. `value_dim`: twice key_dim by default, as in the paper.
        - `kv_heads`: `heads` by default.
        - `rotary`: over all of key_dim with base 10,000 by default. `feature_map`: of queries and keys, before it.
        - `gate`: if False, y = W_out norm(S_tᵀ q_t). `norm`: factory of the norm of each head, an `RMSNorm` by default.

        **Raises** `ValueError` for a length-dependent RoPE scaling, since keys in the state cannot be rotated again.
        """
        if find_length_dependent_scaling(rotary) is not None:
            raise ValueError(
                "keys that were turned for a shorter text cannot be turned again in a state: give a Retention a rotary "
                "whose scaling does not depend on the length"
            )
        key_dim = resolve_head_dim(embed, heads, key_dim, "key_dim")
        if value_dim is None:
            value_dim = 2 * key_dim
        input_key, out_key = jax.random.split(key)
        self.projections = QKVProjections(embed, heads, key_dim, value_dim, kv_heads=kv_heads, key=input_key)
        norm = norm or head_norm_factory(value_dim)
        self.readout = OutputGate(embed, heads, value_dim, norm=norm, gate=gate, out_scale=out_scale, key=out_key)
        self.feature_map = feature_map
        self.rotary = Rotary(key_dim) if rotary is None else rotary
        self.implementation = implementation

    def recur(self, x: HiddenStates, context: RecurrenceContext) -> tuple[HeadVectors, RecurrentState]:
        """**Raises** `ValueError` for a state without positions."""
        require_positions(context.info, context.state)
        query, key, value, _ = self.projections(x, context, None)
        if self.feature_map is not None:
            query, key = self.feature_map(query), self.feature_map(key)
        if self.rotary is not None:
            angles = compute_cos_sin(self.rotary, x, context.info)
            query, key = (apply_rotary(y, *angles, interleaved=self.rotary.interleaved) for y in (query, key))
        mixed, matrix = simple_gla(
            query,
            context.mask_padding(key),
            value,
            _broadcast_log_decay(retention_log_decays, value, context),
            **context.options(),
        )
        return mixed, RecurrentState(matrix)


class Lightning(AbstractRecurrence):
    """y = W_out [sigmoid(W_gate x) * norm(S_tᵀ q_t)] with S_t = exp(-slope_h) S_{t-1} + k_t v_tᵀ and q, k, v each
    silu(W x) (TransNormerLLM, Qin et al., arXiv:2307.14995, section 3; MiniMax-01, arXiv:2501.08313, section 2.2). The
    norm is over all heads together. Heads are sharded over `tensor`, and the mean of the norm is all-reduced."""

    projections: QKVProjections
    readout: OutputGate

    slopes: Float[Array, "heads"] | None = buffer()
    """Slopes of the decays, where layers that are scanned together differ in them; None for those of `depth`."""

    depth: float = eqx.field(static=True)
    """Relative depth of the layer, 0 for the first and 1 for the last: the slopes of decays decrease with depth."""
    implementation: str = implementation_option(GATED_LINEAR)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        head_dim: int | None = None,
        depth: float | int = 0.0,
        slopes: Float[Array, "heads"] | None = None,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `head_dim`: `embed / heads` by default.
        - `slopes`: of the decays, one per head; by default they follow from `depth`.

        **Raises** `ValueError` for a depth outside [0, 1], and for another number of slopes.
        """
        size = resolve_head_dim(embed, heads, head_dim)
        lightning_slopes(heads, depth)
        if slopes is not None and len(slopes) != heads:
            raise ValueError(f"{len(slopes)} slopes were given, and each of {heads} heads has one")
        input_key, out_key = jax.random.split(key)
        self.projections = QKVProjections(embed, heads, size, size, activation=jax.nn.silu, key=input_key)
        self.readout = OutputGate(
            embed,
            heads,
            size,
            norm=partial(RMSNorm, heads * size, features=Dim("heads", size)),
            norm_over_heads=True,
            gate=True,
            activation=jax.nn.sigmoid,
            out_scale=out_scale,
            key=out_key,
        )
        self.slopes = slopes
        self.depth = float(depth)
        self.implementation = implementation

    def recur(self, x: HiddenStates, context: RecurrenceContext) -> tuple[HeadVectors, RecurrentState]:
        query, key, value, _ = self.projections(x, context, None)
        if self.slopes is None:
            log_decay = _broadcast_log_decay(lambda heads: -lightning_slopes(heads, self.depth), value, context)
        else:
            log_decay = jnp.broadcast_to(-self.slopes.astype(jnp.float32), value.shape[:3])
            log_decay = context.mask_padding(log_decay)
        mixed, matrix = simple_gla(
            query,
            context.mask_padding(key),
            value,
            log_decay,
            scale=1.0,
            **context.options(),
        )
        return mixed, RecurrentState(matrix)


class GatedLinearAttention(AbstractRecurrence):
    """y = W_out [silu(W_gate x) * norm(S_tᵀ q_t)] with S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ and g_t =
    logsigmoid(W_up W_down x + b) / 16: a data-dependent decay per key channel (GLA, Yang et al., arXiv:2312.06635,
    section 4.4). Heads are sharded over `tensor`."""

    projections: QKVProjections
    decay: AbstractLinear
    readout: OutputGate

    temperature: float = eqx.field(static=True)
    min_log_decay: float | None = eqx.field(static=True)
    feature_map: Callable | None = eqx.field(static=True)
    implementation: str = implementation_option(GATED_LINEAR)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        kv_heads: int | None = None,
        conv_width: int | None = None,
        feature_map: Callable | None = None,
        rank: int = 16,
        temperature: float | int = 16.0,
        min_log_decay: float | None = None,
        gate: bool = True,
        norm: Callable[[], AbstractNorm] | None = None,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `value_dim`: `embed / heads` by default. `key_dim`: half of value_dim by default, as in the paper.
        - `kv_heads`: `heads` by default; decays have as many.
        - `conv_width`: of short convolutions and silu after the projections; None for none. `feature_map`: of queries
          and keys.
        - `rank`: of the projection to decays. `temperature`: divisor of the log decays. `min_log_decay`: their lower
          bound.
        - `gate`: if False, y = W_out norm(S_tᵀ q_t). `norm`: factory of the norm of each head, an `RMSNorm` by default.
        """
        value_dim = resolve_head_dim(embed, heads, value_dim, "value_dim")
        if key_dim is None:
            key_dim = max(value_dim // 2, 1)
        input_key, decay_key, out_key = jax.random.split(key, 3)
        options = {"kv_heads": kv_heads, "conv_width": conv_width, "activation": jax.nn.silu if conv_width else None}
        self.projections = QKVProjections(embed, heads, key_dim, value_dim, **options, key=input_key)
        decay_dim = Dim("heads" if kv_heads is None else "kv_heads", key_dim)
        size = (kv_heads or heads) * key_dim
        self.decay = LowRank(embed, size, rank=rank, out=decay_dim, bias=True, key=decay_key)
        norm = norm or head_norm_factory(value_dim)
        self.readout = OutputGate(embed, heads, value_dim, norm=norm, gate=gate, out_scale=out_scale, key=out_key)
        self.temperature = float(temperature)
        self.min_log_decay = min_log_decay
        self.feature_map = feature_map
        self.implementation = implementation

    def recur(self, x: HiddenStates, context: RecurrenceContext) -> tuple[HeadVectors, RecurrentState]:
        conv_states = None if context.state is None else context.state.conv_states
        query, key, value, conv_states = self.projections(x, context, conv_states)
        if self.feature_map is not None:
            query, key = self.feature_map(query), self.feature_map(key)
        log_decay = jax.nn.log_sigmoid(self.decay(x).astype(jnp.float32)) / self.temperature
        if self.min_log_decay is not None:
            log_decay = jnp.maximum(log_decay, self.min_log_decay)
        log_decay = log_decay.reshape(*x.shape[:2], -1, key.shape[-1])
        mixed, matrix = gla(
            query,
            context.mask_padding(key),
            value,
            context.mask_padding(self.projections.repeat(log_decay, query)),
            **context.options(),
        )
        return mixed, RecurrentState(matrix, conv_states)


def _broadcast_log_decay(
    make: Callable[[int], Float[Array, "heads"]],
    value: Values,
    context: RecurrenceContext,
) -> Float[Array, "batch seq heads"]:
    """Broadcast fixed log decays `make(heads)` of this device's heads to all tokens, 0 for padding."""
    return context.mask_padding(jnp.broadcast_to(local_heads(make, value), value.shape[:3]))
