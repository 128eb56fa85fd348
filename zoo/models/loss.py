"""Cross-entropy that never holds all logits, over a vocabulary that may be split."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int, Key

from zoo.layers import Routing
from zoo.layers.token_info import batch_token_info
from zoo.parallel import reduce, scan, shard_offset, vary, varying

from .decoder import Decoder
from .load_balancing import BalanceOver, balance_loss, router_z_loss


def cross_entropy(
    model: Decoder,
    batch: Mapping[str, Array],
    *,
    key: Key[Array, "batch"] | None = None,
    z_loss: float = 0.0,
    balance: float = 0.0,
    router_z: float = 0.0,
    over: BalanceOver = "batch",
    chunk: int = 1024,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum over tokens of weight * (log Z - logit[target] + z_loss * (log Z)²), and the sum of the weights.

    - `batch`: `tokens` and `targets`, "batch seq", shifted already; and where wanted `weights` (what counts; 1 unless
      given), `segment_ids`, `positions`.
    - `z_loss`: keeps log Z near zero (PaLM, arXiv:2204.02311, section 5).
    - `balance`, `router_z`: of a mixture of experts, how much of `balance_loss` (with its `over`) and of
      `router_z_loss` is added to the mean over tokens. Both leave out tokens of segment 0, which is padding.
    - `chunk`: how many tokens have logits at a time. With gradients, those of a chunk are taken at once while its
      logits are there: three matrix products a chunk, none of them repeated.

    Logits become float32 before anything is done with them.

    **Raises** `ValueError` for a balance of a model without routers.
    """
    weights = {"balance": balance, "router_z": router_z, "over": over}
    return cross_entropy_and_routing(model, batch, key=key, z_loss=z_loss, chunk=chunk, **weights)[0]


def cross_entropy_and_routing(
    model: Decoder,
    batch: Mapping[str, Array],
    *,
    key: Key[Array, "batch"] | None = None,
    z_loss: float = 0.0,
    balance: float = 0.0,
    router_z: float = 0.0,
    over: BalanceOver = "batch",
    chunk: int = 1024,
) -> tuple[tuple[Float[Array, ""], Float[Array, ""]], tuple[Routing, ...]]:
    """`cross_entropy`, and beside it what the routers decided, one `Routing` a layer that has a router: for `visits`,
    and for losses of one's own."""
    stream, _ = model.hidden(batch["tokens"], batch_token_info(batch, key))
    weights = batch.get("weights")
    weights = jnp.ones(batch["targets"].shape, jnp.float32) if weights is None else weights.astype(jnp.float32)
    x = stream.x.reshape(-1, stream.x.shape[-1])
    total = chunked_cross_entropy(
        model.gather_unembedding(), x, batch["targets"].reshape(-1), weights.reshape(-1), z_loss, chunk
    )
    count, segment_ids = weights.sum(), batch.get("segment_ids")
    real = None if segment_ids is None else segment_ids != 0
    # The library divides by the count: a mean that is to be added is multiplied by it here.
    if balance:
        total = total + balance * balance_loss(stream.routing, real, over=over) * count
    if router_z:
        total = total + router_z * router_z_loss(stream.routing, real) * count
    return (total, count), stream.routing


def token_losses(
    logits: Float[Array, "*tokens vocab"], targets: Int[Array, "*tokens"], *, z_loss: float = 0.0
) -> Float[Array, "*tokens"]:
    """log Z - logit[target] + z_loss * (log Z)² of each token; `logits` may be one share of a split vocabulary."""
    logits = logits.astype(jnp.float32)
    size = logits.shape[-1]
    peak = reduce(lax.stop_gradient(logits).max(-1), over="vocab", by=lax.pmax)
    log_z = jnp.log(reduce(jnp.exp(logits - peak[..., None]).sum(-1), over="vocab")) + peak
    local = targets - shard_offset(logits, "vocab", size)
    here = (0 <= local) & (local < size)
    hit = jnp.take_along_axis(logits, jnp.where(here, local, 0)[..., None], -1)[..., 0]
    return log_z - reduce(jnp.where(here, hit, 0), over="vocab") + z_loss * log_z**2


def chunked_cross_entropy(
    head: Any, x: Array, targets: Array, weights: Array, z_loss: float, chunk: int
) -> Float[Array, ""]:
    """The weighted sum of `token_losses(head(x), targets)`, a chunk of tokens at a time."""
    size = min(chunk, len(x))
    short = -len(x) % size
    padded = (jnp.pad(x, ((0, short), (0, 0))), jnp.pad(targets, (0, short)), jnp.pad(weights, (0, short)))
    parameters, rest = eqx.partition(head, eqx.is_inexact_array)
    fixed, static = eqx.partition(rest, eqx.is_array)

    def one(parameters, fixed, x, targets, weights):
        logits = eqx.combine(parameters, fixed, static)(x)
        return (token_losses(logits, targets, z_loss=z_loss) * weights).sum()

    # a custom gradient must vary as its operands do: made alike here, the cast's own gradient does the sum
    axes = frozenset().union(*map(varying, padded))
    chunks = [y.reshape(-1, size, *y.shape[1:]) for y in vary(padded, axes)]
    return _sum_chunk_losses(one, vary(parameters, axes), vary(fixed, axes), *chunks)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_chunk_losses(
    chunk_loss: Callable, parameters: Any, fixed: Any, x: Array, targets: Array, weights: Array
) -> Float[Array, ""]:
    def step(total, now):
        return total + chunk_loss(parameters, fixed, *now), None

    return scan(step, jnp.zeros(()), (x, targets, weights))[0]


def _sum_chunk_losses_fwd(chunk_loss: Callable, *perturbed_args: Any):
    """A sum is linear: its gradient, up to one factor, is known as soon as a chunk is. So nothing is kept of a chunk
    but the gradient of its rows, and the head's is added up. What nobody asks for, as of a head that is frozen under
    adapters, is not computed: JAX marks what is perturbed."""
    parameters, fixed, *rows = jax.tree.map(lambda x: x.value, perturbed_args)
    asked, *_, asked_x, _, asked_weights = jax.tree.map(lambda x: x.perturbed, perturbed_args)
    learnt, frozen = eqx.partition(parameters, asked)

    def loss_of(wanted, now):
        learnt, *given = wanted
        x, targets, weights = now
        x, weights = (old if new is None else new for old, new in zip((x, weights), given, strict=True))
        return chunk_loss(eqx.combine(learnt, frozen), fixed, x, targets, weights)

    def step(carry, now):
        total, gradients = carry
        x, _, weights = now
        moved = (learnt, x if asked_x else None, weights if asked_weights else None)
        loss, (more, d_x, d_weights) = jax.value_and_grad(loss_of)(moved, now)
        gradients = jax.tree.map(lambda sum, g: sum + g.astype(jnp.float32), gradients, more)
        return (total + loss, gradients), (d_x, d_weights)

    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), learnt)
    (total, gradients), (d_x, d_weights) = scan(step, (jnp.zeros(()), zeros), tuple(rows))
    return total, (jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, learnt), d_x, d_weights)


def _sum_chunk_losses_bwd(chunk_loss: Callable, residuals: Any, cotangent: Any):
    cotangent = jnp.zeros(()) if isinstance(cotangent, SymbolicZero) else cotangent
    parameters, d_x, d_weights = jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), residuals)
    return parameters, None, d_x, None, d_weights


_sum_chunk_losses.defvjp(_sum_chunk_losses_fwd, _sum_chunk_losses_bwd, symbolic_zeros=True)
