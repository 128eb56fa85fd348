"""Mixtures of experts: many feed-forward layers, of which each token uses a few."""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.moe.dispatch import combine, dispatch, sort_by_expert, sort_into_slots
from zoo.parallel import num_shards, reduce, stacked
from zoo.shapes import HiddenStates

from ..abstract import AbstractFeedForward, AbstractLinear
from .router import AbstractRouter
from .routing import Routing


class MixtureOfExperts(AbstractFeedForward):
    """y = Σ_e w_e E_e(x) over the experts that a router chose for x (Shazeer et al., arXiv:1701.06538, equation 1).

    With a `shared` expert, which every token uses, y = S(x) + Σ_e w_e E_e(x) (DeepSeekMoE, arXiv:2401.06066, section
    3.2); its part is multiplied by sigmoid(g x) where there is a `shared_gate` (Qwen1.5-MoE).

    No token is dropped: visits are sorted by expert, each expert multiplies its own, and a token adds up what comes
    back in the order of its choices, so that results are the same bits at every run. With a `capacity_factor` c they
    are dropped, as in GShard (arXiv:2006.16668, section 2.2) and Switch (arXiv:2101.03961, section 2.2): of each row of
    the batch an expert takes at most ceil(c top seq / experts) visits, all first choices before any second one and
    earlier tokens before later; what it does not take adds nothing. A row is a group of its own there, so that results
    do not depend on the mesh; padding takes places as tokens do, and later tokens never take those of earlier ones
    except where these are a token's second choice: a capacity looks ahead, for training only.

    Each expert is split over `tensor` along mlp; a sum over devices comes once, after a token's experts were added up.
    """

    router: AbstractRouter
    experts: AbstractFeedForward = stacked("experts")
    shared: AbstractFeedForward | None
    shared_gate: AbstractLinear | None

    capacity_factor: float | None = eqx.field(static=True)

    def __init__(
        self,
        router: Callable[..., AbstractRouter],
        expert: Callable[..., AbstractFeedForward],
        experts: int,
        *,
        shared: Callable[..., AbstractFeedForward] | None = None,
        shared_gate: Callable[..., AbstractLinear] | None = None,
        capacity_factor: float | int | None = None,
        key: Key[Array, ""],
    ):
        """Makers of the parts, called with `key=`; `expert` once for each of so many `experts`.

        **Raises** `ValueError` for a capacity that is not above 0, and for a gate without a shared expert.
        """
        router_key, experts_key, shared_key, gate_key = jax.random.split(key, 4)
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise ValueError(f"a capacity_factor is above 0, or None where nothing is dropped, not {capacity_factor}")
        if shared_gate is not None and shared is None:
            raise ValueError("a shared_gate weighs what a shared expert gives, and there is none")
        self.router = router(key=router_key)
        self.experts = eqx.filter_vmap(lambda key: expert(key=key))(jax.random.split(experts_key, experts))
        self.shared = None if shared is None else shared(key=shared_key)
        self.shared_gate = None if shared_gate is None else shared_gate(key=gate_key)
        self.capacity_factor = None if capacity_factor is None else float(capacity_factor)

    def __call__(self, x: HiddenStates) -> HiddenStates:
        return self.routed(x)[0]

    def routed(self, x: HiddenStates) -> tuple[HiddenStates, tuple[Routing, ...]]:
        weights, routing = self.router(x)
        mix = self.mix_dropless if self.capacity_factor is None else self.mix_with_capacity
        y = mix(x, weights, routing)
        if self.shared is not None:
            gate = 1 if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x))
            y = y + gate * self.shared(x)
        return y, (routing,)

    def mix_dropless(self, x: HiddenStates, weights: Float[Array, "batch seq top"], routing: Routing) -> HiddenStates:
        flat = x.reshape(-1, x.shape[-1])
        order = sort_by_expert(routing.chosen.reshape(len(flat), -1), routing.logits.shape[-1])
        rows = self.experts.grouped(dispatch(flat, order), order.group_sizes)
        return reduce(combine(rows, weights.reshape(len(flat), -1), order), over="mlp").reshape(x.shape)

    def mix_with_capacity(
        self, x: HiddenStates, weights: Float[Array, "batch seq top"], routing: Routing
    ) -> HiddenStates:
        if num_shards(x, "seq") > 1:
            raise NotImplementedError(
                "a capacity counts along the sequence, which this mesh splits: leave context at 1"
            )
        assert self.capacity_factor is not None
        (batch, seq, embed), top, experts = x.shape, weights.shape[-1], routing.logits.shape[-1]
        capacity = math.ceil(self.capacity_factor * top * seq / experts)
        order, taken = jax.vmap(lambda chosen: sort_into_slots(chosen, experts, capacity))(routing.chosen)
        one_more = lambda values: jnp.pad(values, ((0, 0), (0, 1), (0, 0)))
        slots = jax.vmap(dispatch)(one_more(x), order)[:, :-1].reshape(batch, experts, capacity, embed)
        rows = eqx.filter_vmap(lambda expert, x: expert(x))(self.experts, slots.swapaxes(0, 1))
        rows = one_more(rows.swapaxes(0, 1).reshape(batch, experts * capacity, embed))
        return jax.vmap(combine)(rows, one_more(jnp.where(taken, weights, 0)), order)[:, :seq]
