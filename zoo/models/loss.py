"""Chunked cross-entropy that never materializes all logits, for a replicated or a sharded vocabulary."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int, Key

from zoo._checks import check_batch, check_chunk
from zoo.layers.moe.routing import RoutingSums
from zoo.layers.token_info import batch_token_info
from zoo.ops.custom_vjps import refuse_forward_mode
from zoo.ops.implementations import Implementation, Operation
from zoo.ops.normalization import max_last_dim
from zoo.ops.tokamax import UNMEASURED
from zoo.parallel import num_shards, reduce, scan, vary
from zoo.parallel.collectives import shard_offset, varying

from .decoder import Decoder, find_checkable_vocab
from .encoder_decoder import EncoderDecoder
from .encoders.text import Encoder
from .image_text import ImageText
from .indexer_loss import average_divergence, run_measured
from .load_balancing import BalanceOver, balance_loss, router_z_loss
from .loss_request import LossRequest
from .observe import observe_logits
from .predictors import average_further_losses, predict_further
from .tokamax_loss import find_tokamax_loss_obstacle, tokamax_cross_entropy

_NEGATIVE_WEIGHT = (
    "weights: expected numbers of at least 0, since the mean loss divides by their sum; a policy gradient is a "
    "loss of your own, as in zoo.train.objectives"
)


def cross_entropy(
    model: Decoder | Encoder | EncoderDecoder | ImageText,
    batch: Mapping[str, Any],
    *,
    key: Key[Array, "batch"] | None = None,
    z_loss: float = 0.0,
    balance: float = 0.0,
    router_z: float = 0.0,
    indexer: float = 0.0,
    predictors: float = 0.0,
    over: BalanceOver = "batch",
    chunk: int | None = None,
    implementation: str | Callable = "auto",
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the sum over tokens of weight * (log Z - logit[target] + z_loss * (log Z)²), and the sum of the weights.

    - `batch`: `tokens` and `targets`, "batch seq", already shifted (for an `Encoder`, the tokens before masking, and
      negative where none was masked); optionally `weights` (loss weight of each target, 1 by default), `segment_ids`
      and `positions`; for an `EncoderDecoder` also `source`, and optionally `source_mask`; for an
      `ImageText` also `images`, and optionally `spans`. A negative target is
      ignored, like PyTorch's `ignore_index=-100`: its weight is 0. A weight is at least 0, since the mean divides by
      their sum: a policy gradient, whose advantages may be negative, is a loss of your own with `zoo.train.objectives`.
    - `z_loss`: keeps log Z near zero (PaLM, arXiv:2204.02311, section 5).
    - `balance`, `router_z`: weights of `balance_loss` (with its `over`) and of `router_z_loss`, added to the mean over
      tokens. Both leave out tokens of segment 0, which is padding.
    - `indexer`: weight of the divergence of `zoo.models.indexer_loss`, added to the mean over tokens, which trains the
      indexers of sparse attention, and nothing else.
    - `predictors`: weight of the mean loss of `model.predictors`, added to the mean over tokens. The target of each is
      one token later than the one before, with its weight, and none is in another document. Each loss is divided by the
      weights of its own targets, on all devices of a mesh and in each micro-batch. With `balance`, their routers
      count, too.
    - `chunk`: tokens whose logits are in memory at a time, by default 1,024 on CPUs and 4,096 elsewhere, fewer of a
      vocabulary over 65,536. The gradient of a chunk is computed together with its loss, from the same logits: three
      matrix products per chunk, none of them repeated; in float16 four.
    - `implementation`: a name in `zoo.models.loss.LOSS`: "auto", "chunked", "reference" with all logits in memory, or
      "tokamax" (docs/implementations.md).

    The loss is computed in float32. A sharded vocabulary is not all-gathered: see `token_losses`.

    **Raises** `ValueError` or `TypeError` for a batch with an unknown or a missing key, or with arrays of other shapes
    or dtypes; outside of programs also for an id outside the vocabulary, and for a negative weight in an array of
    NumPy. Inside both give a loss of NaN.
    `ValueError` for a `chunk` below 1, for a batch without rows, for `balance` or `router_z` with a model that has no
    routers, for `indexer` with one that has no indexers, and for `predictors` with one that has none;
    `NotImplementedError` for `predictors` on a mesh with `pipe`.
    """
    weights = {"balance": balance, "router_z": router_z, "indexer": indexer, "predictors": predictors, "over": over}
    options = {"z_loss": z_loss, "chunk": chunk, "implementation": implementation}
    return cross_entropy_and_routing(model, batch, key=key, **options, **weights)[0]


def cross_entropy_and_routing(
    model: Decoder | Encoder | EncoderDecoder | ImageText,
    batch: Mapping[str, Any],
    *,
    key: Key[Array, "batch"] | None = None,
    z_loss: float = 0.0,
    balance: float = 0.0,
    router_z: float = 0.0,
    indexer: float = 0.0,
    predictors: float = 0.0,
    over: BalanceOver = "batch",
    chunk: int | None = None,
    implementation: str | Callable = "auto",
) -> tuple[tuple[Float[Array, ""], Float[Array, ""]], tuple[RoutingSums, ...]]:
    """Return `cross_entropy`, and the `RoutingSums` of each layer that has a router: for `tokens_per_expert`, and for
    auxiliary losses of your own. `configure(model, routing="tokens")` adds the decisions of every token."""
    if isinstance(model, EncoderDecoder | ImageText):
        model, batch = model.bind(batch, key)
    check_batch(batch, find_checkable_vocab(model))
    check_chunk(chunk, batch["tokens"].shape)
    info = batch_token_info(batch, key)
    if indexer:
        hidden, divergence = run_measured(_require_decoder(model, "indexers"), batch["tokens"], info)
    else:
        hidden, _ = model.hidden(batch["tokens"], info)
        divergence = None
    targets = batch["targets"]
    weights = batch.get("weights")
    if weights is None:
        weights = jnp.ones(targets.shape, jnp.float32)
    else:
        if isinstance(weights, np.ndarray) and weights.min(initial=0) < 0:
            raise ValueError(_NEGATIVE_WEIGHT)
        weights = weights.astype(jnp.float32)
        weights = jnp.where(weights < 0, jnp.nan, weights)
    weights = jnp.where(targets < 0, 0, weights)
    x = hidden.x.reshape(-1, hidden.x.shape[-1])
    head = model.gather_unembedding()
    request = LossRequest.from_head(head, x, z_loss, chunk)
    losses = LOSS.select(implementation, request).function

    def sum_losses(x: Array, targets: Array, weights: Array) -> Float[Array, ""]:
        rows = x.reshape(-1, x.shape[-1])
        return losses(head, rows, targets.reshape(-1), weights.reshape(-1), z_loss, request.chunk)

    total = observe_logits(sum_losses(x, targets, weights), model, x, request.chunk)
    count = weights.sum()
    routing = hidden.routing
    # The library divides the total by the count, so an auxiliary loss, which is a mean, is multiplied by it here.
    if predictors:
        states, own_routing = predict_further(_require_decoder(model, "predictors"), batch["tokens"], info, hidden.x)
        total = total + predictors * average_further_losses(states, info, targets, weights, sum_losses) * count
        routing += own_routing
    if balance:
        total = total + balance * balance_loss(routing, over=over) * count
    if router_z:
        total = total + router_z * router_z_loss(routing) * count
    if divergence is not None:
        total = total + indexer * average_divergence(divergence, info) * count
    return (total, count), routing


def _require_decoder(model: Decoder | Encoder, parts: str) -> Decoder:
    """Return a decoder. **Raises** `ValueError` for an encoder, which has none of these parts."""
    if not isinstance(model, Decoder):
        raise ValueError(f"{type(model).__name__} is not a Decoder and has no {parts}")
    return model


def token_losses(
    logits: Float[Array, "*tokens vocab"], targets: Int[Array, "*tokens"], *, z_loss: float = 0.0
) -> Float[Array, "*tokens"]:
    """Compute log Z - logit[target] + z_loss * (log Z)² of each token; `logits` may be a shard of the vocabulary.

    It is 0 for a negative target, with a gradient of 0, and NaN for one beyond the vocabulary, with a gradient of NaN.

    With a sharded vocabulary, each device computes the max and the sum of exp over its shard, and the device whose
    shard has the target reads its logit. Three all-reduces over "vocab" (max, sum, target logit) replace an all-gather
    of the logits. The target's logit is a masked sum: its gradient is computed with the softmax's in one pass, where an
    index would scatter into float32 logits.
    """
    logits = logits.astype(jnp.float32)
    targets = targets.astype(jnp.promote_types(targets.dtype, jnp.int32))
    shard_size = logits.shape[-1]
    peak = reduce(max_last_dim(lax.stop_gradient(logits))[..., 0], over="vocab", by=lax.pmax)
    log_z = jnp.log(reduce(jnp.exp(logits - peak[..., None]).sum(-1), over="vocab")) + peak
    local_targets = targets - shard_offset(logits, "vocab", shard_size)
    is_target = jnp.arange(shard_size) == local_targets[..., None]
    target_logits = reduce(jnp.where(is_target, logits, 0).sum(-1), over="vocab")
    losses = log_z - target_logits + z_loss * log_z**2
    is_known = targets < shard_size * num_shards(logits, "vocab")
    return jnp.where(targets < 0, 0, losses * jnp.where(is_known, 1, jnp.nan))


def reference_cross_entropy(
    head: Any, x: Array, targets: Array, weights: Array, z_loss: float, chunk: int
) -> Float[Array, ""]:
    """Compute the weighted sum of `token_losses(head(x), targets)`, all tokens at once."""
    with jax.named_scope("logits"):
        return (token_losses(head(x), targets, z_loss=z_loss) * weights).sum()


def chunked_cross_entropy(
    head: Any, x: Array, targets: Array, weights: Array, z_loss: float, chunk: int
) -> Float[Array, ""]:
    """Compute the weighted sum of `token_losses(head(x), targets)`, `chunk` tokens at a time."""
    size = min(chunk, len(x))
    padding = -len(x) % size
    padded = (jnp.pad(x, ((0, padding), (0, 0))), jnp.pad(targets, (0, padding)), jnp.pad(weights, (0, padding)))
    parameters, rest = eqx.partition(head, eqx.is_inexact_array)
    integer_arrays, static = eqx.partition(rest, eqx.is_array)

    def chunk_loss(parameters, integer_arrays, x, targets, weights):
        with jax.named_scope("logits"):
            logits = eqx.combine(parameters, integer_arrays, static)(x)
            return (token_losses(logits, targets, z_loss=z_loss) * weights).sum()

    # The gradients of a custom VJP must vary over the same mesh axes as its operands. With all operands made varying
    # here, the gradient of that cast all-reduces the head's gradient.
    axes = frozenset().union(*map(varying, padded))
    chunks = [y.reshape(-1, size, *y.shape[1:]) for y in vary(padded, axes)]
    if x.dtype == jnp.float16:
        sum_chunks = _sum_rematerialized_losses
    else:
        sum_chunks = _sum_chunk_losses
        instead = 'take cross_entropy(..., implementation="reference")'
        parameters, chunks = refuse_forward_mode((parameters, chunks), "the chunked cross-entropy", instead)
    return sum_chunks(chunk_loss, vary(parameters, axes), vary(integer_arrays, axes), *chunks)


def _sum_rematerialized_losses(
    chunk_loss: Callable, parameters: Any, integer_arrays: Any, x: Array, targets: Array, weights: Array
) -> Float[Array, ""]:
    """Compute `_sum_chunk_losses` with a backward pass that computes the logits again, one matrix product more.

    In float16 gradients underflow without a loss scale, which is a factor of the cotangent: they cannot be computed
    ahead of it. Those of the head are summed over chunks in float32.
    """
    dtypes = jax.tree.map(lambda p: p.dtype, parameters)
    parameters = jax.tree.map(lambda p: p.astype(jnp.float32), parameters)

    @jax.checkpoint
    def loss_of(parameters, rows):
        return chunk_loss(jax.tree.map(lambda p, dtype: p.astype(dtype), parameters, dtypes), integer_arrays, *rows)

    add = lambda total, rows: (total + loss_of(parameters, rows), None)
    return scan(add, jnp.zeros((), jnp.float32), (x, targets, weights))[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_chunk_losses(
    chunk_loss: Callable, parameters: Any, integer_arrays: Any, x: Array, targets: Array, weights: Array
) -> Float[Array, ""]:
    def step(total, rows):
        return total + chunk_loss(parameters, integer_arrays, *rows), None

    return scan(step, jnp.zeros((), jnp.float32), (x, targets, weights))[0]


def _sum_chunk_losses_fwd(chunk_loss: Callable, *perturbed_args: Any):
    """Compute losses and gradients chunk by chunk.

    The sum is linear in the chunks, so the gradient of a chunk is known up to one factor, the cotangent, as soon as its
    loss is. The residuals are therefore gradients: of every row, and accumulated ones of the head. Gradients that are
    not needed, such as gradients of a head that is frozen under adapters, are not computed: JAX marks perturbed
    arguments.
    """
    parameters, integer_arrays, *rows = jax.tree.map(lambda x: x.value, perturbed_args)
    perturbed, *_, x_perturbed, _, weights_perturbed = jax.tree.map(lambda x: x.perturbed, perturbed_args)
    trainable, frozen = eqx.partition(parameters, perturbed)

    def loss_of(differentiated, rows):
        trainable, differentiated_x, differentiated_weights = differentiated
        x, targets, weights = rows
        if differentiated_x is not None:
            x = differentiated_x
        if differentiated_weights is not None:
            weights = differentiated_weights
        return chunk_loss(eqx.combine(trainable, frozen), integer_arrays, x, targets, weights)

    def step(carry, rows):
        total, gradients = carry
        x, _, weights = rows
        differentiated_x = x if x_perturbed else None
        differentiated_weights = weights if weights_perturbed else None
        differentiated = (trainable, differentiated_x, differentiated_weights)
        loss, (chunk_gradients, d_x, d_weights) = jax.value_and_grad(loss_of)(differentiated, rows)
        gradients = jax.tree.map(lambda sum, g: sum + g.astype(jnp.float32), gradients, chunk_gradients)
        return (total + loss, gradients), (d_x, d_weights)

    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), trainable)
    (total, gradients), (d_x, d_weights) = scan(step, (jnp.zeros((), jnp.float32), zeros), tuple(rows))
    return total, (jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, trainable), d_x, d_weights)


def _sum_chunk_losses_bwd(chunk_loss: Callable, residuals: Any, cotangent: Any):
    if isinstance(cotangent, SymbolicZero):
        cotangent = jnp.zeros((), jnp.float32)
    parameters, d_x, d_weights = jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), residuals)
    return parameters, None, d_x, None, d_weights


_sum_chunk_losses.defvjp(_sum_chunk_losses_fwd, _sum_chunk_losses_bwd, symbolic_zeros=True)


LOSS = Operation[LossRequest](
    "loss",
    (
        Implementation("tokamax", tokamax_cross_entropy, find_tokamax_loss_obstacle, lambda _: UNMEASURED),
        Implementation("chunked", chunked_cross_entropy),
        Implementation(
            "reference", reference_cross_entropy, find_drawback=lambda _: "it has the logits of all tokens in memory"
        ),
    ),
    kind="loss",
)
"""Implementations of `cross_entropy`, in the order in which `"auto"` tries them."""
