"""Log-probabilities of targets, chunk by chunk of tokens, for a replicated or a sharded vocabulary."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key, Shaped

from zoo._checks import check_batch, check_chunk, check_temperature
from zoo.layers import TokenInfo
from zoo.layers.token_info import batch_token_info
from zoo.ops.normalization import max_last_dim
from zoo.parallel import reduce, scan, vary
from zoo.parallel.collectives import varying
from zoo.shapes import Tokens

from .decoder import Decoder, find_checkable_vocab
from .encoders.text import Encoder
from .image_text import ImageText
from .loss import token_losses

_Temperature = float | Float[Array, ""]


@overload
def log_probs(
    model: Decoder | Encoder | ImageText,
    batch: Mapping[str, Any],
    *,
    temperature: _Temperature = 1.0,
    entropy: Literal[False] = False,
    key: Key[Array, "batch"] | None = None,
    chunk: int = 1024,
) -> Float[Array, "batch seq"]: ...


@overload
def log_probs(
    model: Decoder | Encoder | ImageText,
    batch: Mapping[str, Any],
    *,
    temperature: _Temperature = 1.0,
    entropy: Literal[True],
    key: Key[Array, "batch"] | None = None,
    chunk: int = 1024,
) -> tuple[Float[Array, "batch seq"], Float[Array, "batch seq"]]: ...


def log_probs(
    model: Decoder | Encoder | ImageText,
    batch: Mapping[str, Any],
    *,
    temperature: _Temperature = 1.0,
    entropy: bool = False,
    key: Key[Array, "batch"] | None = None,
    chunk: int = 1024,
) -> Float[Array, "batch seq"] | tuple[Float[Array, "batch seq"], Float[Array, "batch seq"]]:
    """Compute log softmax(logits / temperature)[target] of each target, in float32; 0 for a negative target.

        ratio = zoo.log_probs(model, batch) - lax.stop_gradient(zoo.log_probs(reference, batch))

    The result is sharded as the batch is, over rows and over the sequence: sum it over the tokens of a text with
    `zoo.models.segment_sums.sum_segments` or `zoo.train.sum_pairs`. Losses of post-training are functions of it
    (`zoo.train.objectives`).

    - `batch`: as for `zoo.cross_entropy`. Its `weights` are not applied.
    - `temperature`: of a policy that samples with it.
    - `entropy`: return a pair, with the entropy of each distribution, without a gradient; 0 for a negative target.
    - `key`: PRNG keys for dropout, one per row.
    - `chunk`: tokens whose logits are in memory at a time. The backward pass computes them again: four matrix products
      per chunk, where `zoo.cross_entropy` takes three.

    A sharded vocabulary is not all-gathered: see `zoo.models.token_losses`.

    **Raises** `ValueError` or `TypeError` for a batch as `zoo.cross_entropy` does, and `ValueError` for a `chunk` below
    1 and a temperature that is not above 0. Inside programs a target beyond the vocabulary gives NaN.
    """
    if isinstance(model, ImageText):
        model, batch = model.bind(batch, key)
    check_batch(batch, find_checkable_vocab(model))
    check_chunk(chunk, batch["tokens"].shape)
    check_temperature(temperature)

    def measure(logits: Float[Array, "tokens vocab"], targets: Int[Array, "tokens"]) -> Any:
        logits = logits.astype(jnp.float32) / temperature
        found = -token_losses(logits, targets)
        if not entropy:
            return found
        return found, jnp.where(targets < 0, 0, compute_entropy(lax.stop_gradient(logits)))

    return map_targets(measure, model, batch["tokens"], batch_token_info(batch, key), batch["targets"], chunk)


def map_targets(
    function: Callable[[Float[Array, "tokens vocab"], Int[Array, "tokens"]], Any],
    model: Decoder | Encoder,
    tokens: Tokens,
    info: TokenInfo,
    targets: Int[Array, "batch seq"],
    chunk: int,
) -> Any:
    """Compute `function(logits, targets)` of a model, `chunk` tokens at a time: a tree of arrays "batch seq ..."."""
    hidden, _ = model.hidden(tokens, info)
    return map_logits(function, [(model.gather_unembedding(), hidden.x)], targets, chunk)


def map_logits(
    function: Callable[..., Any],
    models: Sequence[tuple[eqx.Module, Float[Array, "batch seq _"]]],
    targets: Int[Array, "batch seq"],
    chunk: int,
    *others: Shaped[Array, "batch seq ..."],
) -> Any:
    """Compute `function(*logits, targets, *others)`, `chunk` tokens at a time: a tree of arrays "batch seq ...".

    - `models`: unembedding and hidden states of each model; its logits are `unembedding(x)`, "tokens vocab".
    - `others`: further arrays of each token, which `function` gets as "tokens ...".

    The backward pass computes the logits again. Gradients of an unembedding are summed over chunks in float32.
    """
    heads = [head for head, _ in models]
    rows = [x.reshape(-1, x.shape[-1]) for _, x in models]
    of_tokens = [x.reshape(-1, *x.shape[2:]) for x in (targets, *others)]
    tokens = targets.size
    size = min(chunk, tokens)
    axes = frozenset().union(*map(varying, [*rows, *of_tokens]))
    parameters, rest = eqx.partition(heads, eqx.is_inexact_array)
    integer_arrays, static = eqx.partition(rest, eqx.is_array)
    dtypes = jax.tree.map(lambda p: p.dtype, parameters)
    # Cast and made varying here, the gradient of the head leaves the loop once, as a sum in float32.
    parameters, integer_arrays = vary((jax.tree.map(_to_float32, parameters), integer_arrays), axes)

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, -tokens % size), *[(0, 0)] * (x.ndim - 1)))
        return padded.reshape(-1, size, *x.shape[1:])

    @partial(jax.checkpoint, prevent_cse=False)
    def map_chunk(parameters: Any, rows: Sequence[Array], of_tokens: Sequence[Array]) -> Any:
        parameters = jax.tree.map(lambda p, dtype: p.astype(dtype), parameters, dtypes)
        heads = eqx.combine(parameters, integer_arrays, static)
        with jax.named_scope("logits"):
            return function(*[head(x) for head, x in zip(heads, rows, strict=True)], *of_tokens)

    chunks = [split(x) for x in rows], [split(x) for x in of_tokens]
    _, results = scan(lambda carry, chunk: (carry, map_chunk(parameters, *chunk)), (), chunks)
    return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:])[:tokens].reshape(*targets.shape, *y.shape[2:]), results)


def _to_float32(parameter: Float[Array, "..."]) -> Float[Array, "..."]:
    return parameter.astype(jnp.float32)


def log_softmax(logits: Float[Array, "*tokens vocab"]) -> Float[Array, "*tokens vocab"]:
    """Compute logits - log Z in float32, of logits that may be a shard of the vocabulary."""
    logits = logits.astype(jnp.float32)
    peak = reduce(max_last_dim(lax.stop_gradient(logits))[..., 0], over="vocab", by=lax.pmax)[..., None]
    shifted = logits - peak
    return shifted - jnp.log(reduce(jnp.exp(shifted).sum(-1), over="vocab"))[..., None]


def compute_entropy(logits: Float[Array, "*tokens vocab"]) -> Float[Array, "*tokens"]:
    """Compute the entropy of softmax(logits) in nats, of logits that may be a shard of the vocabulary."""
    logs = log_softmax(logits)
    terms = jnp.where(jnp.isneginf(logs), 0, jnp.exp(logs) * logs)  # 0 log 0 is 0
    return -reduce(terms.sum(-1), over="vocab")
