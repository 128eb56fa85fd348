"""Cross-entropy by its definition: the reference for the chunked and vocabulary-sharded losses."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(
    logits: Float[Array, "*tokens vocab"], targets: Int[Array, "*tokens"], *, z_loss: float = 0.0
) -> Float[Array, "*tokens"]:
    """Compute the cross-entropy of each target, in nats and float32: log Z - logits[target] + z_loss (log Z)^2.

    Z = sum(exp(logits)) over the vocabulary. `z_loss` regularizes log Z toward zero, which keeps the logits from
    drifting (PaLM, arXiv 2204.02311, section 5, with 1e-4). A negative target is ignored: its cross-entropy is 0, as
    PyTorch's with `ignore_index`. A target that is not below vocab has a cross-entropy of NaN.
    """
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="fill")[..., 0]  # NaN from vocab on
    return jnp.where(targets < 0, 0, log_z - chosen + z_loss * log_z**2)
