"""Mixture-of-experts feed-forward layer."""

import math
from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.ops.moe.dispatch import combine, dispatch, sort_into_slots
from zoo.ops.moe.grouped_matmul import GROUPED_MATMUL
from zoo.parallel import Module, implementation_option, num_shards, reduce, stacked
from zoo.parallel.tokens import find_token_axes, match_tokens
from zoo.shapes import HiddenStates, ResidualStream

from ..abstract import AbstractFeedForward, AbstractLinear
from .exchange import exchange_slots, mix_experts
from .router import AbstractRouter
from .routing import Routing


class AbstractMixture(Module):
    """A layer with experts, stacked along the dim of experts, and the router that chooses among them."""

    router: eqx.AbstractVar[AbstractRouter]
    experts: eqx.AbstractVar[Module]

    @property
    def num_experts(self) -> int:
        """Number of experts that have parameters."""
        return self.router.scores.out_size


class MixtureOfExperts(AbstractFeedForward, AbstractMixture):
    """y = Σ_e w_e E_e(x) over the top-k experts e that the router chose for x (Shazeer et al., arXiv:1701.06538,
    equation 1).

    With a `shared` expert, which every token uses, y = S(x) + Σ_e w_e E_e(x) (DeepSeekMoE, arXiv:2401.06066, section
    3.2); S(x) is multiplied by sigmoid(g x) with a `shared_gate` (Qwen1.5-MoE). A `multiplier` of 1 / 2 averages the
    two (Command A+, Cohere, 2026).

    `identities` Z are zero-computation experts (MoE++, arXiv:2410.07348, section 3.2; LongCat-Flash, arXiv:2509.01322,
    section 2.1): the router chooses among E + Z, and each of the last Z returns its input,

        y = Σ_{e < E} w_e E_e(x) + Σ_{e >= E} w_e x

    They have no parameters and send no tokens; routing decisions, and the loads counted from them, name all E + Z.

    Dropless by default: tokens are sorted by expert, a grouped matmul applies the experts, and each token combines its
    experts in the order of its choices, so that results are deterministic bit for bit.

    A `capacity_factor` c drops tokens, as in GShard (arXiv:2006.16668, section 2.2) and Switch (arXiv:2101.03961,
    section 2.2). An expert takes at most ceil(c top seq / (E + Z)) tokens of each row of the batch: first choices
    before second ones, earlier tokens before later ones. An expert that is full adds nothing; one without computation
    is never full. Rows are the groups of GShard, so that results do not depend on the mesh. Padding fills capacity like
    tokens. A later token's first choice can displace an earlier token's second one, which is not causal: use a capacity
    for training only.

    Experts are sharded over `expert`, and tokens go to them as `Layout.expert` says; the shared expert is replicated.
    Each is sharded over `tensor` along mlp. The all-reduce (or, with `zoo.parallel.SEQUENCE`, reduce-scatter) comes
    once, after the experts are combined.
    """

    router: AbstractRouter
    experts: AbstractFeedForward = stacked("experts")
    shared: AbstractFeedForward | None
    shared_gate: AbstractLinear | None

    capacity_factor: float | None = eqx.field(static=True)
    multiplier: float = eqx.field(static=True)
    """Factor of the sum of the experts, shared and chosen."""
    identities: int = eqx.field(static=True)
    """Number of zero-computation experts."""
    implementation: str = implementation_option(GROUPED_MATMUL)

    def __init__(
        self,
        router: Callable[..., AbstractRouter],
        expert: Callable[..., AbstractFeedForward],
        experts: int,
        *,
        shared: Callable[..., AbstractFeedForward] | None = None,
        shared_gate: Callable[..., AbstractLinear] | None = None,
        capacity_factor: float | int | None = None,
        multiplier: float = 1.0,
        identities: int = 0,
        implementation: str = "auto",
        key: Key[Array, ""],
    ):
        """`router`, `expert`, `shared` and `shared_gate` are factories, called with `key=`. `expert` is called once per
        expert, `experts` times; the router chooses among `experts + identities`. `implementation` is a name in
        `zoo.ops.moe.grouped_matmul.GROUPED_MATMUL`; with a capacity no matmul is grouped.

        **Raises** `ValueError` for a capacity that is not above 0, for a gate without a shared expert, for fewer
        `identities` than 0, and for a router of another number of experts.
        """
        router_key, experts_key, shared_key, gate_key = jax.random.split(key, 4)
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise ValueError(f"a capacity_factor is above 0, or None where nothing is dropped, not {capacity_factor}")
        if shared_gate is not None and shared is None:
            raise ValueError("a shared_gate weighs what a shared expert gives, and there is none")
        self.router = router(key=router_key)
        self.identities = identities
        if identities < 0 or self.num_experts != experts:
            raise ValueError(
                f"the router chooses among {self.router.scores.out_size}, not {experts} experts and "
                f"identities={identities}"
            )
        self.experts = eqx.filter_vmap(lambda key: expert(key=key))(jax.random.split(experts_key, experts))
        self.shared = None if shared is None else shared(key=shared_key)
        self.shared_gate = None if shared_gate is None else shared_gate(key=gate_key)
        if capacity_factor is None:
            self.capacity_factor = None
        else:
            self.capacity_factor = float(capacity_factor)
        self.multiplier = multiplier
        self.implementation = implementation

    @property
    def num_experts(self) -> int:
        return self.router.scores.out_size - self.identities

    def __call__(self, x: HiddenStates) -> tuple[ResidualStream, tuple[Routing, ...]]:
        weights, routing = self.router(x)
        chosen = routing.chosen
        kept = None
        if self.identities:
            is_identity = chosen >= self.num_experts
            kept = jnp.where(is_identity, weights, 0).sum(-1, keepdims=True)
            weights = jnp.where(is_identity, 0, weights)
            chosen = jnp.minimum(chosen, self.num_experts)
        if self.capacity_factor is None:
            y = self._mix_dropless(x, weights, chosen)
        else:
            y = self._mix_with_capacity(x, weights, chosen)
        if kept is not None:
            y = y + match_tokens((kept * x).astype(x.dtype), y)
        if self.shared is not None:
            shared, _ = self.shared(x)
            if self.shared_gate is None:
                gate = 1
            else:
                gate = jax.nn.sigmoid(self.shared_gate(match_tokens(x, shared)))
            y = y + gate * shared
        if self.multiplier != 1:
            y = self.multiplier * y
        return y, (routing,)

    def _mix_dropless(
        self, x: HiddenStates, weights: Float[Array, "batch seq top"], chosen: Int[Array, "batch seq top"]
    ) -> ResidualStream:
        """Apply the experts that each token chose, wherever they are, and combine."""
        flatten = lambda x: x.reshape(-1, x.shape[-1])
        tokens = flatten(x), flatten(weights), flatten(chosen)
        has_others = self.identities > 0
        y = mix_experts(self.experts, *tokens, self.num_experts, self.implementation, has_others=has_others)
        return reduce(y.reshape(x.shape), over="mlp", into="tokens")

    def _mix_with_capacity(
        self, x: HiddenStates, weights: Float[Array, "batch seq top"], chosen: Int[Array, "batch seq top"]
    ) -> HiddenStates:
        """Dispatch each row's tokens to a fixed number of slots per expert, and combine; dropped tokens add 0."""
        if num_shards(x, "seq") > 1:
            raise NotImplementedError(
                "a capacity counts along the sequence, which this mesh splits: leave context at 1"
            )
        if find_token_axes():
            raise NotImplementedError(
                "experts with a capacity take slots, and not the tokens that zoo.parallel.SEQUENCE shards: use another "
                "layout, or leave capacity_factor out"
            )
        assert self.capacity_factor is not None
        batch, seq, embed = x.shape
        top = weights.shape[-1]
        experts = self.num_experts
        groups = experts + (self.identities > 0)  # the last group is of no expert, and its slots stay here
        capacity = math.ceil(self.capacity_factor * top * seq / (experts + self.identities))
        order, taken = jax.vmap(lambda chosen: sort_into_slots(chosen, groups, capacity))(chosen)
        pad_rows = lambda values, count=1: jnp.pad(values, ((0, 0), (0, count), (0, 0)))
        slots = jax.vmap(dispatch)(pad_rows(x), order)[:, : experts * capacity]
        apply = partial(eqx.filter_vmap(lambda expert, x: expert(x)[0]), self.experts)
        rows = exchange_slots(apply, slots.reshape(batch, experts, capacity, embed).swapaxes(0, 1))
        rows = rows.swapaxes(0, 1).reshape(batch, experts * capacity, embed)
        rows = pad_rows(rows, (groups - experts) * capacity + 1)
        return jax.vmap(combine)(rows, pad_rows(jnp.where(taken, weights, 0)), order)[:, :seq]
