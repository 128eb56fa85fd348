"""Distillation: a student learns the distributions of a teacher over the next token.

    losses = train.objectives.distillation(student, teacher, batch, beta=0.5)
    return (losses * batch["weights"]).sum(), batch["weights"].sum()

The teacher is passed to the loss as an argument. One that is too large to keep in memory writes its k likeliest tokens
of each target once (`zoo.train.store_top_k`), and `distillation_top_k` reads them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from zoo._checks import check_batch, check_chunk, check_temperature
from zoo.layers.token_info import batch_token_info
from zoo.models.capture import capture
from zoo.models.decoder import Decoder, find_checkable_vocab
from zoo.models.log_probs import map_logits
from zoo.models.loss import token_losses
from zoo.parallel import Module, num_shards
from zoo.parallel.collectives import all_gather, shard_offset
from zoo.shapes import HiddenStates

from .divergence import (
    align_vocabularies,
    check_beta,
    compute_log_probs,
    cut_vocabulary,
    jensen_shannon,
    top_k_divergence,
)
from .hidden_projections import HiddenProjections

_Number = float | Float[Array, ""]


class TopK(Module):
    """The k likeliest tokens of a teacher at each target, likeliest first. 6 bytes per token and target as stored."""

    ids: Int[Array, "batch seq top"]
    log_probs: Float[Array, "batch seq top"]


class DistillationTerms(NamedTuple):
    """Losses of each target of a student next to a teacher, from one forward pass of each."""

    divergence: Float[Array, "batch seq"]
    """`distillation`; with a `TopK` as the teacher `distillation_top_k`."""
    log_probs: Float[Array, "batch seq"]
    """The student's log p of the target, at temperature 1, as `zoo.log_probs` computes it."""
    distance: Float[Array, "batch seq"]
    """Mean squared error of projected hidden states; 0 without projections."""


def distillation(
    student: Decoder,
    teacher: Decoder,
    batch: Mapping[str, Array],
    *,
    beta: float = 0.0,
    temperature: _Number = 1.0,
    vocab: int | None = None,
    key: Key[Array, "batch"] | None = None,
    chunk: int = 1024,
) -> Float[Array, "batch seq"]:
    """Compute the `jensen_shannon` divergence of the student from the teacher at each target, in float32; 0 for a
    negative target.

    - `batch`: as for `zoo.cross_entropy`. Its `weights` are not applied.
    - `beta`: 0 is KL(teacher | student), 1 is KL(student | teacher), numbers between weigh both.
    - `temperature`: both models' logits are divided by it. Gradients are smaller by about its square: multiply by it
      to compare temperatures.
    - `vocab`: size of the tokenizer. Needed if the models pad their vocabularies to different sizes: logits beyond are
      left out. Of a sharded vocabulary, the teacher's logits of a chunk are then all-gathered.
    - `key`: PRNG keys for the student's dropout, one per row.
    - `chunk`: tokens whose logits, of both models, are in memory at a time. The backward pass computes them again.

    Both vocabularies stay sharded, as in `zoo.models.token_losses`. The teacher has no gradient.

    **Raises** `ValueError` for a `beta` outside of 0 to 1, a temperature that is not above 0, and vocabularies of
    different sizes without `vocab`; and for a batch or a `chunk` as `zoo.log_probs` does.
    """
    options = {"beta": beta, "temperature": temperature, "vocab": vocab, "key": key, "chunk": chunk}
    return distillation_terms(student, teacher, batch, **options).divergence


def distillation_top_k(
    student: Decoder,
    batch: Mapping[str, Array],
    ids: Int[Array, "batch seq top"],
    log_probs: Float[Array, "batch seq top"],
    *,
    temperature: _Number = 1.0,
    vocab: int | None = None,
    key: Key[Array, "batch"] | None = None,
    chunk: int = 1024,
) -> Float[Array, "batch seq"]:
    """Compute the `top_k_divergence` of the student from a stored teacher at each target; 0 for a negative target.

    - `ids`, `log_probs`: of `top_k_log_probs`, with the same `temperature` and `vocab`. In a program of
      `zoo.value_and_grad` pass a `TopK`, which is sharded along the sequence as the targets are.

    The other arguments are as in `distillation`. **Raises** `ValueError` as it does.
    """
    options = {"temperature": temperature, "vocab": vocab, "key": key, "chunk": chunk}
    return distillation_terms(student, TopK(ids, log_probs), batch, **options).divergence


def distillation_terms(
    student: Decoder,
    teacher: Decoder | TopK,
    batch: Mapping[str, Array],
    *,
    beta: float = 0.0,
    temperature: _Number = 1.0,
    vocab: int | None = None,
    projections: HiddenProjections | None = None,
    key: Key[Array, "batch"] | None = None,
    chunk: int = 1024,
) -> DistillationTerms:
    """Compute the terms of a loss that mixes a divergence with the cross-entropy of the data and with hidden states.

        terms = train.objectives.distillation_terms(student, teacher, batch)
        losses = alpha * -terms.log_probs + (1 - alpha) * terms.divergence

    - `teacher`: a model, or a `TopK` of one.
    - `projections`: of the student's hidden states, trained with it. They need a model as the teacher.

    The other arguments are as in `distillation`. **Raises** `ValueError` as it does, and for a `TopK` with projections,
    or with a `beta` that is not 0.
    """
    check_batch(batch, find_checkable_vocab(student))
    check_chunk(chunk, batch["tokens"].shape)
    check_beta(beta)
    check_temperature(temperature)
    if isinstance(teacher, TopK) and (beta != 0 or projections is not None):
        name = "projections" if beta == 0 else f"beta={beta}"
        raise ValueError(f"{name}: stored top-k log-probabilities give KL(teacher | student) only, at beta=0")

    def finish(logits: Float[Array, "tokens vocab"], targets: Int[Array, "tokens"], divergence: Any) -> Any:
        return jnp.where(targets < 0, 0, divergence), -token_losses(logits, targets)

    def compare_logits(student_logits: Any, teacher_logits: Any, targets: Any) -> Any:
        pair = align_vocabularies(student_logits, lax.stop_gradient(teacher_logits), vocab)
        return finish(student_logits, targets, jensen_shannon(*pair, beta=beta, temperature=temperature))

    def compare_top_k(logits: Any, targets: Any, ids: Any, log_probs: Any) -> Any:
        options = {"temperature": temperature, "vocab": vocab}
        return finish(logits, targets, top_k_divergence(logits, ids, log_probs, **options))

    targets = batch["targets"]
    names = ([], []) if projections is None else projections.names
    x, values = _run(student, batch, key, names[0])
    models = [(student.gather_unembedding(), x)]
    if isinstance(teacher, TopK):
        top_k = lax.stop_gradient((teacher.ids, teacher.log_probs))
        divergence, log_probs = map_logits(compare_top_k, models, targets, chunk, *top_k)
        return DistillationTerms(divergence, log_probs, jnp.zeros_like(divergence))
    y, teacher_values = lax.stop_gradient(_run(teacher, batch, None, names[1]))
    models.append((_stop_gradient(teacher.gather_unembedding()), y))
    divergence, log_probs = map_logits(compare_logits, models, targets, chunk)
    distance = jnp.zeros_like(divergence)
    if projections is not None:
        distance = jnp.where(targets < 0, 0, projections(values, teacher_values))
    return DistillationTerms(divergence, log_probs, distance)


def _run(
    model: Decoder, batch: Mapping[str, Array], key: Key[Array, "batch"] | None, names: list[str]
) -> tuple[HiddenStates, list[Array]]:
    """Return the hidden states after the final norm, and the values of these names."""
    info = batch_token_info(batch, key)
    if not names:
        hidden, _ = model.hidden(batch["tokens"], info)
        return hidden.x, []
    (hidden, _), values = capture(model.hidden, *names)(batch["tokens"], info)
    return hidden.x, [jnp.asarray(values[name]) for name in names]


def _stop_gradient(module: eqx.Module) -> Any:
    arrays, static = eqx.partition(module, eqx.is_array)
    return eqx.combine(lax.stop_gradient(arrays), static)


def top_k_log_probs(
    teacher: Decoder,
    batch: Mapping[str, Array],
    k: int,
    *,
    temperature: _Number = 1.0,
    vocab: int | None = None,
    chunk: int = 1024,
) -> TopK:
    """Compute ids (int32) and log-probabilities (float16) of a teacher's k likeliest tokens at each target.

        find = zoo.spmd(lambda teacher, batch: train.objectives.top_k_log_probs(teacher, batch, 64), mesh, out="")

    - `temperature`, `vocab`, `chunk`: as in `distillation`.

    Of a sharded vocabulary, the k likeliest of each shard are all-gathered.

    **Raises** `ValueError` for a `k` below 1 or above the size of the vocabulary, and as `distillation` does.
    """
    check_batch(batch, find_checkable_vocab(teacher))
    check_chunk(chunk, batch["tokens"].shape)
    check_temperature(temperature)

    def find(logits: Float[Array, "tokens vocab"], targets: Int[Array, "tokens"]) -> Any:
        size = logits.shape[-1]
        largest = size * num_shards(logits, "vocab") if vocab is None else vocab
        if not 1 <= k <= largest:
            raise ValueError(f"k={k}: expected a number of tokens from 1 to {largest}, the size of the vocabulary")
        logs = compute_log_probs(cut_vocabulary(logits, vocab), temperature)
        log_probs, ids = lax.top_k(logs, min(k, size))
        ids = ids + shard_offset(logits, "vocab", size)
        log_probs, ids = (all_gather(x, "vocab", axis=-1) for x in (log_probs, ids))
        log_probs, order = lax.top_k(log_probs, k)
        return jnp.take_along_axis(ids, order, -1).astype(jnp.int32), log_probs.astype(jnp.float16)

    x, _ = _run(teacher, batch, None, [])
    return TopK(*map_logits(find, [(teacher.gather_unembedding(), x)], batch["targets"], chunk))
