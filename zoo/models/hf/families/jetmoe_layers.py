"""Layers of JetMoE: softmax attention whose projections of queries and outputs are experts, the block around it, and
the bias of a mixture."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key

from zoo.layers import AbstractFeedForward, AbstractLinear, AbstractMixer, AbstractNorm, Dropout, Linear, TokenInfo
from zoo.layers.abstract import run_feed_forward
from zoo.layers.attention.base import attend, make_cache, rotate
from zoo.layers.heads import split_heads
from zoo.layers.kv_cache import KeyValueCache
from zoo.layers.moe.mixture import AbstractMixture
from zoo.layers.moe.router import AbstractRouter
from zoo.layers.moe.routing import Routing
from zoo.layers.rotary import rope_switch_length
from zoo.models.decoder import AbstractBlock, Hidden
from zoo.ops.attention import ATTENTION
from zoo.ops.moe.dispatch import combine, dispatch, sort_by_expert
from zoo.ops.moe.grouped_matmul import GROUPED_MATMUL, grouped_matmul_implementation
from zoo.ops.rotary import Rotary
from zoo.parallel import Dim, Module, implementation_option, named_by_class, reduce, stacked
from zoo.parallel.tokens import run_on_all_tokens, shard_tokens
from zoo.shapes import HiddenStates, ResidualStream


class AttentionExpert(Module):
    """Projections of one expert of a `MixtureOfAttention`: the queries of its heads, and their output."""

    query: AbstractLinear
    out: AbstractLinear

    def __init__(self, embed: int, heads: int, head_dim: int, *, out_scale: float = 1.0, key: Key[Array, ""]):
        query_key, out_key = jax.random.split(key)
        dims = Dim("embed"), Dim("heads", head_dim)
        self.query = Linear(embed, heads * head_dim, in_=dims[0], out=dims[1], key=query_key)
        self.out = Linear(heads * head_dim, embed, in_=dims[1], out=dims[0], scale=out_scale, key=out_key)


class MixtureOfAttention(AbstractMixer, AbstractMixture):
    """Mixture of attention heads (MoA; Zhang et al., arXiv:2210.05144; with several heads per expert in JetMoE,
    arXiv:2404.07413, section 2.3): a router chooses the top-k experts e of x, each with projections of its own of
    queries and outputs. All experts share keys and values, of as many heads as an expert has:

        q_e = rotate(W_query,e x),    k = rotate(W_key x),    v = W_value x
        y = Σ_e w_e W_out,e softmax(q_e kᵀ / sqrt(head_dim) + mask) v + bias

    It is grouped-query attention in which the chosen experts compute the queries of a group: the KV cache, kernels and
    a sequence sharded over `context` work as in `zoo.layers.Attention`. Tokens are sorted by expert for the two grouped
    matmuls, and combined in the order of their choices, as in `zoo.layers.MixtureOfExperts`.

    Heads are sharded over `tensor`. Unlike the experts of a feed-forward layer, these are replicated over `expert`,
    which shards only the batch: choices then stay on the device of their token.
    """

    shards_sequence = True
    shards_state = True

    router: AbstractRouter
    experts: AttentionExpert = stacked("choices")
    key: AbstractLinear
    value: AbstractLinear
    bias: Float[Array, "embed"]

    head_dim: int = eqx.field(static=True)
    rotary: Rotary | None = eqx.field(static=True)
    implementation: str | Callable = implementation_option(ATTENTION)
    grouped_matmul: str = implementation_option(GROUPED_MATMUL)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        router: Callable[..., AbstractRouter],
        experts: int,
        head_dim: int,
        rotary: Rotary | None = None,
        implementation: str | Callable = "auto",
        grouped_matmul: str = "auto",
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `heads`: of an expert, and of keys and values. A token has as many queries per head as it has experts.
        - `router`: a factory, called with `key=`.
        - `experts`: number of experts.
        """
        router_key, experts_key, key_key, value_key = jax.random.split(key, 4)
        make = lambda key: AttentionExpert(embed, heads, head_dim, out_scale=out_scale, key=key)
        project = lambda key: Linear(embed, heads * head_dim, in_=Dim("embed"), out=Dim("kv_heads", head_dim), key=key)
        self.router = router(key=router_key)
        self.experts = eqx.filter_vmap(make)(jax.random.split(experts_key, experts))
        self.key = project(key_key)
        self.value = project(value_key)
        self.bias = jnp.zeros(embed, jnp.float32)
        self.head_dim = head_dim
        self.rotary = rotary
        self.implementation = implementation
        self.grouped_matmul = grouped_matmul

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None = None
    ) -> tuple[ResidualStream, KeyValueCache | None]:
        """Return the output, and the updated KV cache. **Raises** `ValueError` as `mix` does."""
        y, (state, _) = self.mix(x, info, state)
        return y, state

    def mix(
        self, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None = None
    ) -> tuple[ResidualStream, tuple[KeyValueCache | None, tuple[Routing, ...]]]:
        """Return the output, the updated KV cache, and the decisions of the router.

        These are two equal ones, for the experts of queries and for the experts of outputs: a load-balancing loss
        counts both, as in transformers. **Raises** `ValueError` for a cache without positions.
        """
        weights, routing = self.router(x)
        flatten = lambda x: x.reshape(-1, x.shape[-1])
        order = sort_by_expert(flatten(routing.chosen), routing.logits.shape[-1])
        by_choice = order._replace(row_indices=order.row_indices.reshape(-1, 1))  # each choice as a token of its own
        with grouped_matmul_implementation(self.grouped_matmul):
            rows = self.experts.query.grouped(dispatch(flatten(x), order), order.group_sizes)
        rows = combine(rows, jnp.ones((rows.shape[0], 1), jnp.float32), by_choice)
        query = rows.reshape(*weights.shape, -1, self.head_dim)
        query = query.swapaxes(2, 3).reshape(*x.shape[:2], -1, self.head_dim)  # the experts' queries of a head together
        key, value = (split_heads(project(x), self.head_dim) for project in (self.key, self.value))
        query, key = rotate(query, key, self.rotary, x, info, state)
        top = weights.shape[-1]
        mixed, state = attend(query, key, value, info, state, group=top, implementation=self.implementation)
        mixed = mixed.reshape(*x.shape[:2], -1, top, self.head_dim).swapaxes(2, 3)
        mixed = mixed.reshape(-1, mixed.shape[-2] * self.head_dim)
        with grouped_matmul_implementation(self.grouped_matmul):
            rows = self.experts.out.grouped(dispatch(mixed, by_choice), order.group_sizes)
        y = combine(rows, flatten(weights), order).reshape(x.shape)
        return reduce(y, over="heads", into="tokens") + self.bias, (state, (routing, routing))

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> KeyValueCache:
        """Return an empty KV cache for `length` tokens."""
        return make_cache(batch, length, self.key.out_size // self.head_dim, self.head_dim, dtype)

    @property
    def rope_switch_length(self) -> int | None:
        return rope_switch_length(self.rotary)


class OutputBias(AbstractFeedForward):
    """y = b for every token. As the `shared` expert of a `zoo.layers.MixtureOfExperts` it is the bias of the mixture's
    output (JetMoE, arXiv:2404.07413)."""

    bias: Float[Array, "embed"]

    def __init__(self, embed: int, *, key: Key[Array, ""] | None = None):
        """Initialize with zeros; the `key` is not used."""
        self.bias = jnp.zeros(embed, jnp.float32)

    def __call__(self, x: HiddenStates) -> tuple[ResidualStream, tuple[()]]:
        return shard_tokens(jnp.broadcast_to(self.bias, x.shape)), ()


class RoutedMixerBlock(AbstractBlock):
    """The pre-norm layer, x + mixer(norm(x)) and x + ffn(norm(x)), with a mixer that has a router. Its decisions join
    the routing decisions of the feed-forward layer (JetMoE, arXiv:2404.07413, section 2)."""

    mixer_norm: AbstractNorm
    mixer: MixtureOfAttention = named_by_class()
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    dropout: Dropout

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        return self.mixer.init_state(batch, length, dtype)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        mixed, (state, routing) = run_on_all_tokens(self.mixer.mix, self.mixer_norm(hidden.x), info, state)
        mixed = checkpoint_name(mixed, "mixer_output")
        hidden = hidden.add_residual(self.dropout(mixed, info, site=0), routing)
        fed, routing = run_feed_forward(self.ffn, self.ffn_norm(hidden.x))
        fed = checkpoint_name(fed, "ffn_output")
        return hidden.add_residual(self.dropout(fed, info, site=1), routing), state
