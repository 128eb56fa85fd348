"""Delta rules by `tokamax.ops.kimi_delta_attention`: Pallas kernels for TPUs, from v6e on.

The kernels compute KDA, with one decay per key channel. A decay per head is repeated over the channels, and none is 0.
They take chunks of 64 tokens; a shorter last one is padded with tokens that neither write nor decay.

The kernels exponentiate differences of log decays within a chunk without a bound. In Pallas' interpreter the gradients
were exact for log decays from -5 on, which is also the smallest `lower_bound` that tokamax takes. Decays of -5 times a
softplus gave gradients that were off by 18%, or NaN; decays of -30 times one gave outputs of NaN. So a head of a row
with a smaller log decay than -5 gives NaN, here and on every platform.
"""

import functools
from types import ModuleType

import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.shapes import LogDecays, MatrixState, Queries, SegmentIds, Values

from ..implementations import Implementation
from ..platform import current_platform
from ..tokamax import UNMEASURED, call_tokamax, find_device_kind, find_tokamax_obstacle
from .select import RecurrenceRequest, find_sharding_obstacle

SMALLEST_LOG_DECAY = -5.0
"""Log decay of a token below which a head gives NaN."""
_OLDER = ("TPU v2", "TPU v3", "TPU v4", "TPU v5")
_CHUNK_SIZE = 64
_LARGEST_KEY = 256
_INSTEAD = 'set recurrence="chunked", as zoo.twice_differentiable(model) does'


def tokamax_delta_rule(
    query: Queries,
    key: Queries,
    value: Values,
    beta: Float[Array, "batch seq heads"],
    log_decay: LogDecays | None = None,
    *,
    state: MatrixState | None = None,
    segment_ids: SegmentIds | None = None,
) -> tuple[Values, MatrixState]:
    """Compute `delta_rule`, with `log_decay` `gated_delta_rule` or `kda`: by Pallas kernels on TPUs, token by token on
    CPUs. A head with a log decay below -5 gives NaN.

    **Raises** `ValueError` for several rows per token and for segments, and with tokamax's reason.
    """
    request = RecurrenceRequest.from_heads(
        query, value, log_decay, steps=key.shape[1] // query.shape[1], state=state, segment_ids=segment_ids
    )
    if obstacle := _find_obstacle(request):
        raise ValueError(f"tokamax_delta_rule cannot compute this, because {obstacle}")
    batch, seq, heads, key_dim = query.shape
    if state is None:
        state = jnp.zeros((batch, heads, key_dim, value.shape[-1]), jnp.float32)
    if log_decay is None:
        log_decay = jnp.zeros((batch, seq, heads), jnp.float32)
    if log_decay.ndim == 3:
        log_decay = jnp.broadcast_to(log_decay[..., None], query.shape)
    log_decay = log_decay.astype(jnp.float32)
    is_exact = (log_decay >= SMALLEST_LOG_DECAY).all((1, 3))
    sequences = query, key, value, log_decay, beta.astype(jnp.float32)
    operands = *(_to_chunks(x) for x in sequences), state[:, None]
    name = "xla" if current_platform() == "cpu" else "mosaic"
    run = functools.partial(_call_delta_rule, name)
    output, last = call_tokamax(run, operands, operation="delta rule", instead=_INSTEAD)
    output = jnp.moveaxis(output, 0, 2)[:, :seq]
    output = jnp.where(is_exact[:, None, :, None], output, jnp.nan).astype(value.dtype)
    return output, jnp.where(is_exact[..., None, None], last[:, 0].astype(jnp.float32), jnp.nan)


def _find_obstacle(request: RecurrenceRequest) -> str | None:
    """Return why `tokamax_delta_rule` cannot compute a request, or None."""
    if reason := find_sharding_obstacle(request) or find_tokamax_obstacle("cpu", "tpu"):
        return reason
    if current_platform() == "tpu" and (kind := find_device_kind()).startswith(_OLDER):
        return f"its kernels are for TPUs from v6e on, not for a {kind}"
    if request.steps > 1:
        return "it takes one step per token"
    if request.has_segments:
        return "rows are packed, and it keeps one state per segment, whose number a program does not know"
    if request.key_dim > _LARGEST_KEY:
        return f"it takes up to {_LARGEST_KEY} key channels, not {request.key_dim}"
    if request.dtype not in (jnp.float32, jnp.bfloat16):
        return f"it computes in float32 or bfloat16, not {jnp.dtype(request.dtype).name}"
    return None


TOKAMAX = Implementation("tokamax", tokamax_delta_rule, _find_obstacle, lambda _: UNMEASURED)
"""The implementation of delta rules by tokamax."""


def _to_chunks(x: Float[Array, "batch seq heads *dims"]) -> Float[Array, "heads batch padded *dims"]:
    """Move the heads to the front, and pad the tokens to whole chunks."""
    padding = [(0, 0), (0, -x.shape[1] % _CHUNK_SIZE)] + [(0, 0)] * (x.ndim - 2)
    return jnp.moveaxis(jnp.pad(x, padding), 2, 0)


def _call_delta_rule(
    name: str,
    tokamax: ModuleType,
    query: Array,
    key: Array,
    value: Array,
    log_decay: Array,
    beta: Array,
    state: Array,
) -> tuple[Array, Array]:
    options = {"initial_state": state, "output_final_state": True, "implementation": name}
    return tokamax.ops.kimi_delta_attention(query, key, value, log_decay, beta, **options)
