"""DeltaNet and its gated variants: linear attention that replaces the value of a key instead of adding to it. The
recurrences are in `zoo.ops.recurrence.delta_rule`.

Queries and keys are L2-normalized silu(conv(W x)), values silu(conv(W x)); heads are normalized before the output
projection. `negative_eigenvalues` allows beta up to 2, with which state tracking becomes possible (Grazzi et al.,
arXiv:2411.12537). With `groups`, fewer than heads, several heads that follow one another share the query and key of a
group. Heads and groups are sharded over `tensor`; groups that are fewer than its devices are replicated.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.recurrence.delta_rule import DELTA_RULE, delta_rule, gated_delta_product, gated_delta_rule, kda
from zoo.parallel import Dim, Module, implementation_option
from zoo.shapes import HeadVectors, HiddenStates, Queries

from ..abstract import AbstractLinear
from ..convolution import ConvState
from ..heads import select_kv_heads
from ..linear import Linear, resolve_head_dim
from .base import AbstractRecurrence
from .common import (
    DecayGate,
    LowRank,
    OutputGate,
    QKVProjections,
    RecurrentState,
    head_norm_factory,
    l2_normalize,
    split_heads_and_steps,
)
from .context import RecurrenceContext

_DeltaRuleArrays = tuple[
    Queries,
    Float[Array, "batch rows heads key_dim"],
    Float[Array, "batch rows heads value_dim"],
    Float[Array, "batch rows heads"],
]
_ProjectedArrays = tuple[
    Float[Array, "batch seq groups key_dim"],
    Float[Array, "batch rows groups key_dim"],
    Float[Array, "batch rows heads value_dim"],
    Float[Array, "batch rows heads"],
]


class DeltaInputs(Module):
    """Queries, keys and values of a delta rule, and its write strengths beta = max_beta * sigmoid(W x)."""

    projections: QKVProjections
    rate: AbstractLinear | None
    """W; without it, beta is max_beta."""

    group: int = eqx.field(static=True)
    """Heads per group."""
    num_householder: int = eqx.field(static=True)
    """Delta-rule steps per token."""
    max_beta: float = eqx.field(static=True)
    """1, or 2 with negative eigenvalues."""
    activation: Callable = eqx.field(static=True)
    normalize: Callable = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        *,
        groups: int | None = None,
        num_householder: int = 1,
        conv_width: int | None,
        negative_eigenvalues: bool,
        learned_beta: bool = True,
        activation: Callable = jax.nn.silu,
        normalize: Callable = l2_normalize,
        key: Key[Array, ""],
    ):
        """`activation` and `normalize` are of queries and keys."""
        input_key, rate_key = jax.random.split(key)
        self.projections = QKVProjections(
            embed,
            heads,
            key_dim,
            value_dim,
            groups=groups,
            num_householder=num_householder,
            conv_width=conv_width,
            key=input_key,
        )
        self.rate = None
        if learned_beta:
            self.rate = Linear(
                embed, heads * num_householder, in_=Dim("embed"), out=Dim("heads", num_householder), key=rate_key
            )
        self.group = heads // (groups or heads)
        self.num_householder = num_householder
        self.max_beta = 2.0 if negative_eigenvalues else 1.0
        self.activation = activation
        self.normalize = normalize

    def __call__(self, x: HiddenStates, context: RecurrenceContext) -> tuple[_DeltaRuleArrays, tuple[ConvState, ...]]:
        """Return normalized queries and keys, values, and betas (0 for padding); and the updated convolution states, if
        there are any."""
        (query, key, value, beta), conv_states = self.project(x, context)
        query, key = (self.share(self.normalize(units), value) for units in (query, key))
        return (query, key, value, beta), conv_states

    def project(self, x: HiddenStates, context: RecurrenceContext) -> tuple[_ProjectedArrays, tuple[ConvState, ...]]:
        """Return what `__call__` does, with queries and keys of groups that are not normalized."""
        conv_states = None if context.state is None else context.state.conv_states
        query, key, value, conv_states = self.projections(x, context, conv_states)
        query, key, value = self.activation(query), self.activation(key), jax.nn.silu(value)
        if self.rate is None:
            beta = jnp.ones((*x.shape[:2], value.shape[2]), jnp.float32)
        else:
            beta = jax.nn.sigmoid(self.rate(x).astype(jnp.float32))
        beta = context.mask_padding(self.max_beta * beta)
        beta = split_heads_and_steps(beta, value.shape[2], 1)[..., 0]
        return (query, key, value, beta), conv_states

    def share(
        self, x: Float[Array, "batch seq groups key_dim"], heads: Float[Array, "batch rows heads _"]
    ) -> Float[Array, "batch seq heads key_dim"]:
        """Repeat the vector of each group for its heads on this device."""
        x = select_kv_heads(x, heads, self.group)
        return jnp.repeat(x, heads.shape[2] // x.shape[2], axis=2)


class AbstractDeltaRule(AbstractRecurrence):
    """A recurrence by a delta rule, with queries, keys, values and betas that `corrector` makes of x."""

    corrector: eqx.AbstractVar[DeltaInputs]

    @property
    def projections(self) -> QKVProjections:
        return self.corrector.projections


class DeltaNet(AbstractDeltaRule):
    """y = W_out norm(S_tᵀ q_t) with S_t = S_{t-1} + k_t (beta_t (v_t - S_{t-1}ᵀ k_t))ᵀ (Schlag et al.,
    arXiv:2102.11174; Yang et al., arXiv:2406.06484, section 3.3). The output gate silu(W_gate x) is optional."""

    corrector: DeltaInputs
    readout: OutputGate

    implementation: str = implementation_option(DELTA_RULE)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_width: int | None = 4,
        negative_eigenvalues: bool = False,
        learned_beta: bool = True,
        activation: Callable = jax.nn.silu,
        normalize: Callable = l2_normalize,
        gate: bool = False,
        epsilon: float = 1e-6,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `key_dim`: `embed / heads` by default. `value_dim`: `key_dim` by default.
        - `learned_beta`: if False, beta is 1, or 2 with negative eigenvalues.
        - `activation`, `normalize`: of queries and keys.
        - `gate`: multiply the normalized heads by silu(W_gate x).
        - `epsilon`: of the norm of each head's output.
        """
        key_dim, value_dim = resolve_head_dims(embed, heads, key_dim, value_dim)
        input_key, out_key = jax.random.split(key)
        options = {"conv_width": conv_width, "negative_eigenvalues": negative_eigenvalues}
        of_keys = {"learned_beta": learned_beta, "activation": activation, "normalize": normalize}
        self.corrector = DeltaInputs(embed, heads, key_dim, value_dim, **options, **of_keys, key=input_key)
        norm = head_norm_factory(value_dim, epsilon)
        self.readout = OutputGate(embed, heads, value_dim, norm=norm, gate=gate, out_scale=out_scale, key=out_key)
        self.implementation = implementation

    def recur(self, x: HiddenStates, context: RecurrenceContext) -> tuple[HeadVectors, RecurrentState]:
        inputs, conv_states = self.corrector(x, context)
        mixed, matrix = delta_rule(*inputs, **context.options())
        return mixed, RecurrentState(matrix, conv_states)


class GatedDeltaNet(AbstractDeltaRule):
    """y = W_out [silu(W_gate x) * norm(S_tᵀ q_t)] with R_t = exp(g_t) S_{t-1} and
    S_t = R_t + k_t (beta_t (v_t - R_tᵀ k_t))ᵀ, g_t one per head (Yang et al., arXiv:2412.06464, section 3). The output
    gate is optional."""

    corrector: DeltaInputs
    decay: DecayGate
    readout: OutputGate

    implementation: str = implementation_option(DELTA_RULE)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        groups: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_width: int | None = 4,
        negative_eigenvalues: bool = False,
        gate: bool = True,
        gate_activation: Callable = jax.nn.silu,
        epsilon: float = 1e-6,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `key_dim`: `embed / heads` by default. `value_dim`: `key_dim` by default.
        - `gate`: multiply the normalized heads by gate_activation(W_gate x).
        - `epsilon`: of the norm of each head's output.
        """
        key_dim, value_dim = resolve_head_dims(embed, heads, key_dim, value_dim)
        input_key, decay_key, out_key = jax.random.split(key, 3)
        options = {"groups": groups, "conv_width": conv_width, "negative_eigenvalues": negative_eigenvalues}
        self.corrector = DeltaInputs(embed, heads, key_dim, value_dim, **options, key=input_key)
        self.decay = DecayGate(partial(Linear, embed, in_=Dim("embed")), heads, key=decay_key)
        norm = head_norm_factory(value_dim, epsilon)
        options = {"gate": gate, "activation": gate_activation}
        self.readout = OutputGate(embed, heads, value_dim, norm=norm, **options, out_scale=out_scale, key=out_key)
        self.implementation = implementation

    def recur(self, x: HiddenStates, context: RecurrenceContext) -> tuple[HeadVectors, RecurrentState]:
        inputs, conv_states = self.corrector(x, context)
        mixed, matrix = gated_delta_rule(*inputs, context.mask_padding(self.decay(x)), **context.options())
        return mixed, RecurrentState(matrix, conv_states)


class KimiDeltaAttention(AbstractDeltaRule):
    """y = W_out [sigmoid(W_gate x) * norm(S_tᵀ q_t)] with the gated delta rule and one decay per key channel: KDA (Kimi
    Linear, arXiv:2510.26692, section 3). The projections of decays and gate have low rank, by default `key_dim`, or
    full rank."""

    corrector: DeltaInputs
    decay: DecayGate
    readout: OutputGate

    implementation: str = implementation_option(DELTA_RULE)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        groups: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        rank: int | Literal["full"] | None = None,
        lower_bound: float | None = None,
        conv_width: int | None = 4,
        negative_eigenvalues: bool = False,
        gate_bias: bool = False,
        epsilon: float = 1e-6,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `key_dim`: `embed / heads` by default. `value_dim` and `rank`: `key_dim` by default.
        - `rank`: of the projections of decays and gate, "full" for plain matrices.
        - `lower_bound`: of the log decays, see `DecayGate`.
        - `epsilon`: of the norm of each head's output.
        """
        key_dim, value_dim = resolve_head_dims(embed, heads, key_dim, value_dim)
        if rank is None:
            rank = key_dim
        input_key, decay_key, out_key = jax.random.split(key, 3)
        options = {"groups": groups, "conv_width": conv_width, "negative_eigenvalues": negative_eigenvalues}
        project = Linear if rank == "full" else partial(LowRank, rank=rank)
        self.corrector = DeltaInputs(embed, heads, key_dim, value_dim, **options, key=input_key)
        self.decay = DecayGate(
            partial(project, embed, in_=Dim("embed")), heads, key_dim, lower_bound=lower_bound, key=decay_key
        )
        norm = head_norm_factory(value_dim, epsilon)
        gate = {"gate": partial(project, bias=gate_bias), "activation": jax.nn.sigmoid}
        self.readout = OutputGate(embed, heads, value_dim, norm=norm, **gate, out_scale=out_scale, key=out_key)
        self.implementation = implementation

    def recur(self, x: HiddenStates, context: RecurrenceContext) -> tuple[HeadVectors, RecurrentState]:
        inputs, conv_states = self.corrector(x, context)
        mixed, matrix = kda(*inputs, context.mask_padding(self.decay(x)), **context.options())
        return mixed, RecurrentState(matrix, conv_states)


class GatedDeltaProduct(AbstractDeltaRule):
    """`GatedDeltaNet` with `num_householder` delta-rule steps per token, each with its own key, value and beta: the
    state transition is a product of generalized Householder matrices (DeltaProduct, Siems et al., arXiv:2502.10297,
    section 4). The decay and the output gate are optional."""

    corrector: DeltaInputs
    decay: DecayGate | None
    readout: OutputGate

    implementation: str = implementation_option(DELTA_RULE)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        num_householder: int = 2,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_width: int | None = 4,
        negative_eigenvalues: bool = True,
        decay: bool = True,
        gate: bool = True,
        epsilon: float = 1e-6,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `num_householder`: delta-rule steps per token.
        - `key_dim`: `embed / heads` by default. `value_dim`: `key_dim` by default.
        - `gate`: multiply the normalized heads by silu(W_gate x).
        - `epsilon`: of the norm of each head's output.
        """
        key_dim, value_dim = resolve_head_dims(embed, heads, key_dim, value_dim)
        input_key, decay_key, out_key = jax.random.split(key, 3)
        options = {
            "num_householder": num_householder,
            "conv_width": conv_width,
            "negative_eigenvalues": negative_eigenvalues,
        }
        self.corrector = DeltaInputs(embed, heads, key_dim, value_dim, **options, key=input_key)
        self.decay = None
        if decay:
            self.decay = DecayGate(partial(Linear, embed, in_=Dim("embed")), heads, key=decay_key)
        norm = head_norm_factory(value_dim, epsilon)
        self.readout = OutputGate(embed, heads, value_dim, norm=norm, gate=gate, out_scale=out_scale, key=out_key)
        self.implementation = implementation

    def recur(self, x: HiddenStates, context: RecurrenceContext) -> tuple[HeadVectors, RecurrentState]:
        inputs, conv_states = self.corrector(x, context)
        if self.decay is None:
            log_decay = jnp.zeros_like(inputs[3][:, :: self.corrector.num_householder])
        else:
            log_decay = context.mask_padding(self.decay(x))
        mixed, matrix = gated_delta_product(*inputs, log_decay, **context.options())
        return mixed, RecurrentState(matrix, conv_states)


def resolve_head_dims(embed: int, heads: int, key_dim: int | None, value_dim: int | None) -> tuple[int, int]:
    """Return key_dim and value_dim with their defaults, `embed / heads` and key_dim."""
    key_dim = resolve_head_dim(embed, heads, key_dim, "key_dim")
    if value_dim is None:
        value_dim = key_dim
    return key_dim, value_dim
