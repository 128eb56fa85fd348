"""Divergences of a student's distribution over the next token from a teacher's, of logits that may be shards of the
vocabulary."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from zoo._checks import check_temperature
from zoo.models.log_probs import log_softmax
from zoo.parallel import num_shards, reduce
from zoo.parallel.collectives import all_gather, shard_offset

_Number = float | Float[Array, ""]
_NO_LOGIT = -1e30
"""Stands for a logit of minus infinity, whose difference to another is not a number."""


def jensen_shannon(
    student_logits: Float[Array, "*tokens vocab"],
    teacher_logits: Float[Array, "*tokens vocab"],
    *,
    beta: float = 0.0,
    temperature: _Number = 1.0,
) -> Float[Array, "*tokens"]:
    """Compute the generalized Jensen-Shannon divergence of two distributions in nats, in float32:

        p = softmax(teacher_logits / temperature), q = softmax(student_logits / temperature)
        beta KL(p | m) + (1 - beta) KL(q | m),  m = beta p + (1 - beta) q

    At 0 and 1, where this vanishes, it is KL(p | q) and KL(q | p): its limits when divided by beta (1 - beta). The
    divergence of GKD (Agarwal et al., arXiv:2306.13649, section 2), as in TRL. Logits may be shards of the vocabulary.

    **Raises** `ValueError` for a `beta` outside of 0 to 1, and a temperature that is not above 0.
    """
    check_beta(beta)
    check_temperature(temperature)
    p = compute_log_probs(teacher_logits, temperature)
    q = compute_log_probs(student_logits, temperature)
    if beta == 0:
        terms = _kl_terms(p, q)
    elif beta == 1:
        terms = _kl_terms(q, p)
    else:
        m = jnp.logaddexp(p + jnp.log(beta), q + jnp.log1p(-beta))
        terms = beta * _kl_terms(p, m) + (1 - beta) * _kl_terms(q, m)
    return reduce(terms.sum(-1), over="vocab")


def top_k_divergence(
    student_logits: Float[Array, "*tokens vocab"],
    ids: Int[Array, "*tokens top"],
    log_probs: Float[Array, "*tokens top"],
    *,
    temperature: _Number = 1.0,
    vocab: int | None = None,
) -> Float[Array, "*tokens"]:
    """Compute KL(teacher | student) of k + 1 classes: the teacher's k likeliest tokens, and all others as one.

    With k = vocab it is the divergence of the whole distributions. With fewer it is a lower bound of it, and never
    negative. Log-probabilities that are rounded (float16) are scaled where they sum to more than 1.

    - `student_logits`: may be a shard of the vocabulary. Logits beyond `vocab`, by default its size, are left out.

    **Raises** `ValueError` for a temperature that is not above 0, and for a `vocab` that the student does not have.
    """
    check_temperature(temperature)
    q_all = compute_log_probs(cut_vocabulary(student_logits, vocab), temperature)
    size = q_all.shape[-1]
    local_ids = ids - shard_offset(q_all, "vocab", size)
    is_local = (0 <= local_ids) & (local_ids < size)
    found = jnp.take_along_axis(q_all, jnp.where(is_local, local_ids, 0), -1)
    q = reduce(jnp.where(is_local, found, 0), over="vocab")
    p = jnp.maximum(log_probs.astype(jnp.float32), _NO_LOGIT)
    total = jnp.exp(p).sum(-1, keepdims=True)
    if ids.shape[-1] == (vocab or size * num_shards(q_all, "vocab")):
        return _kl_terms(p - jnp.log(total), q).sum(-1)
    p = p - jnp.log(jnp.maximum(total, 1))
    p_rest = jnp.log(jnp.maximum(1 - total, 1e-30))
    # The others are summed, not subtracted from 1: they may have far less than 1e-7 of the student's mass.
    places = jnp.where(is_local, local_ids, size)  # beyond the shard, they are dropped
    is_listed = jnp.put_along_axis(jnp.zeros_like(q_all, bool), places, True, -1, inplace=False, mode="drop")
    others = jnp.where(is_listed, _NO_LOGIT, q_all)
    peak = reduce(lax.stop_gradient(others).max(-1, keepdims=True), over="vocab", by=lax.pmax)
    q_rest = peak + jnp.log(reduce(jnp.exp(others - peak).sum(-1, keepdims=True), over="vocab"))
    return _kl_terms(jnp.append(p, p_rest, -1), jnp.append(q, q_rest, -1)).sum(-1)


def _kl_terms(log_p: Float[Array, "*rest"], log_q: Float[Array, "*rest"]) -> Float[Array, "*rest"]:
    """Compute p (log p - log q), the terms of KL(p | q)."""
    return jnp.exp(log_p) * (log_p - log_q)


def compute_log_probs(logits: Float[Array, "*tokens vocab"], temperature: _Number) -> Float[Array, "*tokens vocab"]:
    """Compute log softmax(logits / temperature) in float32, finite for logits of minus infinity."""
    return log_softmax(jnp.maximum(logits.astype(jnp.float32), _NO_LOGIT) / temperature)


def align_vocabularies(
    student_logits: Float[Array, "*tokens vocab"], teacher_logits: Float[Array, "*tokens _"], vocab: int | None
) -> tuple[Float[Array, "*tokens vocab"], Float[Array, "*tokens vocab"]]:
    """Return the logits of the first `vocab` tokens, of the teacher in the shards that the student's are in.

    Of vocabularies of different sizes, the shards hold different tokens: the teacher's logits are all-gathered.

    **Raises** `ValueError` for vocabularies of different sizes without `vocab`, and for one that a model does not have.
    """
    size = student_logits.shape[-1]
    student_vocab = size * num_shards(student_logits, "vocab")
    teacher_vocab = teacher_logits.shape[-1] * num_shards(teacher_logits, "vocab")
    if student_vocab != teacher_vocab:
        if vocab is None:
            raise ValueError(
                f"the student has a vocabulary of {student_vocab:,} tokens and the teacher of {teacher_vocab:,}: if "
                "one tokenizer is padded to both, pass its size as vocab"
            )
        _check_vocab(vocab, teacher_vocab, "teacher")
        whole = all_gather(teacher_logits, "vocab", axis=-1)[..., :student_vocab]
        padding = [(0, 0)] * (whole.ndim - 1) + [(0, student_vocab - whole.shape[-1])]
        start = shard_offset(student_logits, "vocab", size)
        teacher_logits = lax.dynamic_slice_in_dim(jnp.pad(whole, padding), start, size, axis=-1)
    return cut_vocabulary(student_logits, vocab), cut_vocabulary(teacher_logits, vocab)


def cut_vocabulary(logits: Float[Array, "*tokens vocab"], vocab: int | None) -> Float[Array, "*tokens vocab"]:
    """Leave all but the first `vocab` tokens out of the distribution. **Raises** `ValueError` if there are fewer."""
    size = logits.shape[-1]
    total = size * num_shards(logits, "vocab")
    if vocab is None or vocab == total:
        return logits
    _check_vocab(vocab, total, "model")
    ids = shard_offset(logits, "vocab", size) + jnp.arange(size)
    return jnp.where(ids < vocab, logits.astype(jnp.float32), _NO_LOGIT)


def _check_vocab(vocab: int, size: int, name: str) -> None:
    if not 1 <= vocab <= size:
        raise ValueError(f"vocab={vocab}: expected a size from 1 to {size:,}, the vocabulary of the {name}")


def check_beta(beta: float) -> None:
    """**Raises** `ValueError` for a number outside of 0 to 1."""
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta}: 0 for KL(teacher | student), 1 for KL(student | teacher), or a number between")
