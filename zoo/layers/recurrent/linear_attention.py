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

from ..abstract import AbstractLinear
from ..kv_cache import require_positions
from ..linear import resolve_head_dim
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
    -0.5]. Heads are sharded over `tensor`."""

    projections: QKVProjections
    readout: OutputGate

    feature_map: Callable = eqx.field(static=True)
    normalized: bool = eqx.field(static=True)
    implementation: str = implementation_option(GATED_LINEAR)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        head_dim: int | None = None,
        feature_map: Callable = elu_plus_one,
        normalized: bool = True,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """`head_dim`: `embed / heads` by default. `feature_map`: elementwise, and positive if `normalized`."""
        size = resolve_head_dim(embed, heads, head_dim)
        input_key, out_key = jax.random.split(key)
        self.projections = QKVProjections(embed, heads, size, size, key=input_key)
        self.readout = OutputGate(embed, heads, size, out_scale=out_scale, key=out_key)
        self.feature_map = feature_map
        self.normalized = normalized
        self.implementation = implementation

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> RecurrentState:
        return self.projections.init_state(batch, self.projections.value_dim + self.normalized, dtype)

    def recur(self, x: HiddenStates, context: RecurrenceContext) -> tuple[HeadVectors, RecurrentState]:
        query, key, value, _ = self.projections(x, context, None)
        query = self.feature_map(query)
        key = context.mask_padding(self.feature_map(key))
        attend = normalized_linear_attention if self.normalized else linear_attention
        mixed, matrix = attend(query, key, value, **context.options())
        return mixed, RecurrentState(matrix)


class Retention(AbstractRecurrence):
    """y = W_out [silu(W_gate x) * norm(S_tᵀ q_t)] with S_t = gamma_h S_{t-1} + k_t v_tᵀ, with RoPE on queries and
    keys and fixed decays gamma_h = 1 - 2 ** (-5 - h) (RetNet, Sun et al., arXiv:2307.08621, section 2). Heads are
    sharded over `tensor`."""

    projections: QKVProjections
    readout: OutputGate

    rotary: Rotary | None = eqx.field(static=True)
    implementation: str = implementation_option(GATED_LINEAR)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        rotary: Rotary | None = None,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `key_dim`: `embed / heads` by default. `value_dim`: twice key_dim by default, as in the paper.
        - `rotary`: over all of key_dim with base 10,000 by default.

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
        self.projections = QKVProjections(embed, heads, key_dim, value_dim, key=input_key)
        norm = head_norm_factory(value_dim)
        self.readout = OutputGate(embed, heads, value_dim, norm=norm, gate=True, out_scale=out_scale, key=out_key)
        self.rotary = Rotary(key_dim) if rotary is None else rotary
        self.implementation = implementation

    def recur(self, x: HiddenStates, context: RecurrenceContext) -> tuple[HeadVectors, RecurrentState]:
        """**Raises** `ValueError` for a state without positions."""
        require_positions(context.info, context.state)
        query, key, value, _ = self.projections(x, context, None)
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
    implementation: str = implementation_option(GATED_LINEAR)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        rank: int = 16,
        temperature: float | int = 16.0,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `value_dim`: `embed / heads` by default. `key_dim`: half of value_dim by default, as in the paper.
        - `rank`: of the projection to decays. `temperature`: divisor of the log decays.
        """
        value_dim = resolve_head_dim(embed, heads, value_dim, "value_dim")
        if key_dim is None:
            key_dim = max(value_dim // 2, 1)
        input_key, decay_key, out_key = jax.random.split(key, 3)
        self.projections = QKVProjections(embed, heads, key_dim, value_dim, key=input_key)
        decay_dim = Dim("heads", key_dim)
        self.decay = LowRank(embed, heads * key_dim, rank=rank, out=decay_dim, bias=True, key=decay_key)
        norm = head_norm_factory(value_dim)
        self.readout = OutputGate(embed, heads, value_dim, norm=norm, gate=True, out_scale=out_scale, key=out_key)
        self.temperature = float(temperature)
        self.implementation = implementation

    def recur(self, x: HiddenStates, context: RecurrenceContext) -> tuple[HeadVectors, RecurrentState]:
        query, key, value, _ = self.projections(x, context, None)
        log_decay = jax.nn.log_sigmoid(self.decay(x).astype(jnp.float32)) / self.temperature
        mixed, matrix = gla(
            query,
            context.mask_padding(key),
            value,
            context.mask_padding(log_decay.reshape(key.shape)),
            **context.options(),
        )
        return mixed, RecurrentState(matrix)


def _broadcast_log_decay(
    make: Callable[[int], Float[Array, "heads"]],
    value: Values,
    context: RecurrenceContext,
) -> Float[Array, "batch seq heads"]:
    """Broadcast fixed log decays `make(heads)` of this device's heads to all tokens, 0 for padding."""
    return context.mask_padding(jnp.broadcast_to(local_heads(make, value), value.shape[:3]))
