"""Gated DeltaNet-2 and Comba: delta rules that read with another vector than they write. The recurrences are in
`zoo.ops.recurrence.decoupled_delta`.

Queries and keys are L2-normalized silu(conv(W x)), values silu(conv(W x)); heads are normalized before the output
projection. Heads are sharded over `tensor`.
"""

from functools import partial
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.recurrence.decoupled_delta import comba, gdn2
from zoo.ops.recurrence.generalized_delta import GENERALIZED_DELTA
from zoo.parallel import Dim, full_precision, implementation_option
from zoo.shapes import HeadVectors, HiddenStates

from ..abstract import AbstractLinear
from ..linear import Linear
from .base import AbstractRecurrence
from .common import DecayGate, LowRank, OutputGate, QKVProjections, RecurrentState, head_norm_factory, l2_normalize
from .context import RecurrenceContext
from .delta_net import AbstractDeltaRule, DeltaInputs, resolve_head_dims


class GatedDeltaNet2(AbstractRecurrence):
    """y = W_out [sigmoid(W_gate x) * norm(S_tᵀ q_t)] with R_t = diag(exp(g_t)) S_{t-1} and
    S_t = R_t + k_t (w_t * v_t - R_tᵀ (b_t * k_t))ᵀ: KDA with an erase gate b = sigmoid(W_erase x) per key channel and a
    write gate w = sigmoid(W_write x) per value channel in place of beta (Gated DeltaNet-2, Hatamizadeh et al.,
    arXiv:2605.22791). The projections of decays and output gate have low rank, by default `key_dim`, or full rank."""

    projections: QKVProjections
    erase: AbstractLinear
    write: AbstractLinear
    decay: DecayGate
    readout: OutputGate

    max_erase: float = eqx.field(static=True)
    """1, or 2 with negative eigenvalues."""
    implementation: str = implementation_option(GENERALIZED_DELTA)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        rank: int | Literal["full"] | None = None,
        lower_bound: float | None = None,
        conv_width: int = 4,
        negative_eigenvalues: bool = False,
        epsilon: float = 1e-6,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `key_dim`: `embed / heads` by default. `value_dim` and `rank`: `key_dim` by default.
        - `rank`: of the projections of decays and output gate, "full" for plain matrices.
        - `lower_bound`: of the log decays, see `DecayGate`.
        - `negative_eigenvalues`: allow erase gates up to 2 (Grazzi et al., arXiv:2411.12537).
        - `epsilon`: of the norm of each head's output.
        """
        key_dim, value_dim = resolve_head_dims(embed, heads, key_dim, value_dim)
        if rank is None:
            rank = key_dim
        input_key, erase_key, write_key, decay_key, out_key = jax.random.split(key, 5)
        self.projections = QKVProjections(
            embed, heads, key_dim, value_dim, conv_width=conv_width, activation=jax.nn.silu, key=input_key
        )
        project = partial(Linear, embed, in_=Dim("embed"))
        self.erase = project(heads * key_dim, out=Dim("heads", key_dim), key=erase_key)
        self.write = project(heads * value_dim, out=Dim("heads", value_dim), key=write_key)
        gate = Linear if rank == "full" else partial(LowRank, rank=rank)
        self.decay = DecayGate(
            partial(gate, embed, in_=Dim("embed")), heads, key_dim, lower_bound=lower_bound, key=decay_key
        )
        norm = head_norm_factory(value_dim, epsilon)
        options = {"gate": gate, "activation": jax.nn.sigmoid}
        self.readout = OutputGate(embed, heads, value_dim, norm=norm, **options, out_scale=out_scale, key=out_key)
        self.max_erase = 2.0 if negative_eigenvalues else 1.0
        self.implementation = implementation

    def recur(self, x: HiddenStates, context: RecurrenceContext) -> tuple[HeadVectors, RecurrentState]:
        conv_states = None if context.state is None else context.state.conv_states
        query, key, value, conv_states = self.projections(x, context, conv_states)
        erase, write = (jax.nn.sigmoid(gate(x).astype(jnp.float32)) for gate in (self.erase, self.write))
        mixed, matrix = gdn2(
            l2_normalize(query),
            context.mask_padding(l2_normalize(key)),
            value,
            context.mask_padding(self.decay(x)),
            self.max_erase * erase.reshape(key.shape),
            write.reshape(value.shape),
            **context.options(),
        )
        return mixed, RecurrentState(matrix, conv_states)


class Comba(AbstractDeltaRule):
    """y = W_out [sigmoid(W_gate x) * norm(S_tᵀ (q_t - d k_t))] with
    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - S_{t-1}ᵀ p_t))ᵀ and p_t = sigmoid(b) k_t, with numbers b and d per head:
    feedback from the state to what is written, and from the key to what is read (Hu et al., arXiv:2506.02475). The
    output gate is optional.

    The kernels of flash-linear-attention compute another function: with `normalize_last`, the read is q_t - d p_t, and
    it, k_t and p_t have unit length, so that the length of p_t, and with it b, has next to no effect.
    """

    corrector: DeltaInputs
    decay: DecayGate
    feedback: Float[Array, "units"] = full_precision()
    """b: the read key is sigmoid(b) times the key."""
    correction: Float[Array, "units"] = full_precision()
    """d: how much of the key the query loses."""
    readout: OutputGate

    units: Dim = eqx.field(static=True)
    """Heads of queries and keys."""
    normalize_last: bool = eqx.field(static=True)
    implementation: str = implementation_option(GENERALIZED_DELTA)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        groups: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_width: int | None = 4,
        correction: float | int = 1.0,
        normalize_last: bool = False,
        gate: bool = True,
        epsilon: float = 1e-6,
        out_scale: float = 1.0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """- `key_dim`: `embed / heads` by default. `value_dim`: `key_dim` by default; twice that in the paper.
        - `correction`: d at initialization: 1 in the paper's models of 1.3 billion parameters, 0.02 in smaller ones.
        - `normalize_last`: bring the read, k and p to unit length at the end, and not q and k at first.
        - `gate`: multiply the normalized heads by sigmoid(W_gate x).
        - `epsilon`: of the norm of each head's output.
        """
        key_dim, value_dim = resolve_head_dims(embed, heads, key_dim, value_dim)
        input_key, decay_key, out_key = jax.random.split(key, 3)
        options = {"groups": groups, "conv_width": conv_width, "negative_eigenvalues": False}
        self.corrector = DeltaInputs(embed, heads, key_dim, value_dim, **options, key=input_key)
        self.decay = DecayGate(partial(Linear, embed, in_=Dim("embed")), heads, key=decay_key)
        self.feedback = jnp.ones(groups or heads, jnp.float32)
        self.correction = jnp.full(groups or heads, float(correction), jnp.float32)
        norm = head_norm_factory(value_dim, epsilon)
        gates = {"gate": gate, "activation": jax.nn.sigmoid}
        self.readout = OutputGate(embed, heads, value_dim, norm=norm, **gates, out_scale=out_scale, key=out_key)
        self.units = Dim("heads" if groups is None else "groups")
        self.normalize_last = normalize_last
        self.implementation = implementation

    def recur(self, x: HiddenStates, context: RecurrenceContext) -> tuple[HeadVectors, RecurrentState]:
        (query, key, value, beta), conv_states = self.corrector.project(x, context)
        if not self.normalize_last:
            query, key = l2_normalize(query), l2_normalize(key)
        read = (jax.nn.sigmoid(self.feedback)[:, None] * key.astype(jnp.float32)).astype(key.dtype)
        subtracted = read if self.normalize_last else key
        query = (query - self.correction[:, None] * subtracted.astype(jnp.float32)).astype(query.dtype)
        if self.normalize_last:
            query, key, read = l2_normalize(query), l2_normalize(key), l2_normalize(read)
        query, key, read = (self.corrector.share(units, value) for units in (query, key, read))
        log_decay = context.mask_padding(self.decay(x))
        mixed, matrix = comba(query, key, value, read, beta, log_decay, **context.options())
        return mixed, RecurrentState(matrix, conv_states)
