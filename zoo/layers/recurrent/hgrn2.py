"""HGRN2: gated linear attention with keys tied to the forget gate, k = 1 - exp(g). The recurrence is GLA's."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.recurrence.gated_linear import GATED_LINEAR
from zoo.ops.recurrence.linear_attention import gla
from zoo.parallel import buffer, implementation_option
from zoo.shapes import HeadVectors, HiddenStates

from ..abstract import AbstractNorm
from ..linear import resolve_head_dim
from .base import AbstractRecurrence
from .common import HeadNorm, OutputGate, QKVProjections, RecurrentState
from .context import RecurrenceContext


class HGRN2(AbstractRecurrence):
    """y = W_out norm(S_tᵀ q_t) with S_t = diag(f_t) S_{t-1} + (1 - f_t) v_tᵀ, q = silu(W_query x), v = W_value x and
    f = bound + (1 - bound) sigmoid(W_key x): the input gate of a key channel is 1 minus its forget gate (Qin et al.,
    arXiv:2404.07904, section 3). In the paper the lower bound of the forget gate is trainable per layer and feature,
    and increases with depth (`zoo.models.hf.families.hgrn2_layers`); here it is a constant of the layer, unless
    `bounds` are put in. Heads are sharded over `tensor`."""

    projections: QKVProjections
    readout: OutputGate

    bounds: Float[Array, "features"] | None = buffer()
    """Lower bounds of each feature, which a model computes for all of its layers; None for `bound`."""

    bound: float = eqx.field(static=True)
    implementation: str = implementation_option(GATED_LINEAR)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        bound: float | int = 0.0,
        conv_width: int | None = None,
        norm: Callable[[], AbstractNorm] | None = None,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `key_dim`, `value_dim`: `embed / heads` by default.
        - `bound`: lower bound of the forget gate, in [0, 1).
        - `conv_width`: of short convolutions after the projections; None for none.
        - `norm`: factory of the norm over the values of all heads; by default each head has one (`HeadNorm`).
        """
        if not 0 <= bound < 1:
            raise ValueError(f"a forget gate's bound is at least 0 and below 1, not {bound}")
        key_dim = resolve_head_dim(embed, heads, key_dim, "key_dim")
        value_dim = resolve_head_dim(embed, heads, value_dim, "value_dim")
        input_key, out_key = jax.random.split(key)
        self.projections = QKVProjections(embed, heads, key_dim, value_dim, conv_width=conv_width, key=input_key)
        if norm is None:
            norm = lambda: HeadNorm(heads, value_dim)
        self.readout = OutputGate(
            embed, heads, value_dim, norm=norm, norm_over_heads=True, out_scale=out_scale, key=out_key
        )
        self.bounds = None
        self.bound = float(bound)
        self.implementation = implementation

    def recur(self, x: HiddenStates, context: RecurrenceContext) -> tuple[HeadVectors, RecurrentState]:
        conv_states = None if context.state is None else context.state.conv_states
        query, gate, value, conv_states = self.projections(x, context, conv_states)
        gate = gate.astype(jnp.float32)
        bound = self.bound
        if self.bounds is not None:
            bound = self.bounds.astype(jnp.float32).reshape(gate.shape[2:])
        # Compute log f and 1 - f separately, so that neither loses precision where f is near 0 or 1.
        log_decay = jax.nn.log_sigmoid(gate)
        if self.bounds is not None or self.bound:
            is_bounded = jnp.greater(bound, 0)  # the logarithm of 0 has no gradient
            log_bound = jnp.log(jnp.where(is_bounded, bound, 1))
            bounded = jnp.logaddexp(log_bound, jnp.log1p(-jnp.where(is_bounded, bound, 0)) + log_decay)
            log_decay = jnp.where(is_bounded, bounded, log_decay)
        key = ((1 - bound) * jax.nn.sigmoid(-gate)).astype(value.dtype)
        mixed, matrix = gla(
            jax.nn.silu(query),
            context.mask_padding(key),
            value,
            context.mask_padding(log_decay),
            scale=1.0,
            **context.options(),
        )
        return mixed, RecurrentState(matrix, conv_states)
