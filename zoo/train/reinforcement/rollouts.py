"""Rollouts: rows of sampled completions for training, with the advantages and log-probabilities of their tokens.

    batch, rollouts = train.pack_rollouts(prompts, samples, advantages, seq_len)
    loss, grads = zoo.value_and_grad(loss_fn, mesh)(model, *zoo.place_batch((batch, rollouts), mesh))

`loss_fn(model, batch, rollouts)` combines `zoo.log_probs` with functions of `zoo.train.objectives`.
"""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer, Shaped

from zoo.generate.run import Generated
from zoo.parallel import Module, num_shards, reduce
from zoo.text.batches import assign_rows

from .grouped_samples import Samples


class Rollouts(Module):
    """Numbers that belong to the targets of a batch of sampled completions; 0 where nothing was sampled.

    A module, so that its arrays are sharded as the targets are, along the sequence too.
    """

    advantages: Float[Array, "batch seq"]
    sampler: Float[Array, "batch seq"]
    """Log-probability with which each token was drawn."""
    rows: Int[Array, "batch"]
    """Number of each row in the batch."""
    log_probs: Float[Array, "batch seq"] | None = None
    """Log-probability under the policy before the first update of this batch, by the program that trains. None in the
    first update, where it is the current one."""
    reference: Float[Array, "batch seq"] | None = None
    """Log-probability under the frozen reference of a KL term; None without one."""

    def find_largest(self, x: Float[Array, "batch seq"], count: int) -> Float[Array, "batch_rows"]:
        """Return the largest |x| of each of the `count` rows of the batch, inside a loss function: an array that is 0
        for rows of other devices and micro-batches, which add up to all rows (`has_aux` of `zoo.value_and_grad`)."""
        largest = reduce(jnp.abs(x).max(axis=1), over="seq", by=lax.pmax) / num_shards(x, "seq")
        is_row = self.rows[:, None] == jnp.arange(count)
        return jnp.where(is_row, largest[:, None], 0).sum(axis=0)


def pack_rollouts(
    prompts: Mapping[str, Shaped[np.ndarray, "prompts ..."]],
    generated: Samples | Generated,
    advantages: Float[np.ndarray, "prompts samples"],
    seq_len: int,
    *,
    process: tuple[int, int] = (0, 1),
) -> tuple[dict[str, Shaped[np.ndarray, "batch seq"]], Rollouts]:
    """Put each prompt and completion into a row of `seq_len` targets: a batch, and the numbers of its targets.

    Rows begin with the prompt, without its padding. `weights` are 1 on sampled tokens, the one that ends the text
    included; other targets are -1. `segment_ids` are 1 in the text and 0 after it.

    - `prompts`: `tokens` and `mask`, left-padded.
    - `generated`: `samples` completions of each prompt, from `sample_groups` or `zoo.generate(..., details=True)`.
    - `process`: (index, count) of the rows to return, `zoo.parallel.reader(mesh)`; the arguments have all rows.

    **Raises** `ValueError` for numbers of rows that do not fit one another, prompts padded on the right or empty, a
    completion that goes on after its end or is empty, a text longer than a row, and advantages or log-probabilities
    that are not finite.
    """
    advantages = np.asarray(advantages)
    tokens, log_probs = (np.asarray(x) for x in (generated.tokens, generated.sampling_log_probs))
    mask = np.asarray(prompts["mask"], bool)
    texts = np.repeat(np.asarray(prompts["tokens"]), advantages.shape[1], axis=0)
    _check_rollouts(mask, tokens, log_probs, advantages)
    (index, _), size = assign_rows(len(tokens), process)
    rows = range(index * size, (index + 1) * size)
    groups = [row // advantages.shape[1] for row in rows]
    pairs = [(texts[row][mask[group]], tokens[row][tokens[row] >= 0]) for row, group in zip(rows, groups, strict=True)]
    for row, (prompt, new) in zip(rows, pairs, strict=True):
        length = len(prompt) + len(new)
        if length - 1 > seq_len:
            raise ValueError(
                f"row {row} has a prompt of {len(prompt)} tokens and a completion of {len(new)}, and seq_len={seq_len} "
                f"holds {seq_len + 1} in all: use seq_len={length - 1} or more"
            )
    batch = make_rows(pairs, seq_len)
    batch["targets"][batch["weights"] == 0] = -1
    numbers = {name: np.zeros((size, seq_len), np.float32) for name in ("advantages", "sampler")}
    for place, row in enumerate(rows):
        is_sampled = batch["weights"][place] > 0
        numbers["advantages"][place, is_sampled] = advantages.reshape(-1)[row]
        numbers["sampler"][place, is_sampled] = log_probs[row, : is_sampled.sum()]
    return batch, Rollouts(
        advantages=jnp.asarray(numbers["advantages"]),
        sampler=jnp.asarray(numbers["sampler"]),
        rows=jnp.asarray(np.array(rows, np.int32)),
    )


def make_rows(
    texts: Sequence[tuple[Int[np.ndarray, "prompt"], Int[np.ndarray, "new"]]], seq_len: int
) -> dict[str, Shaped[np.ndarray, "batch seq"]]:
    """Make a row of each prompt with its completion, one segment, with weight 1 on the tokens of the completion."""
    dtypes = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), np.int32) | {"weights": np.float32}
    rows = {name: np.zeros((len(texts), seq_len), dtype) for name, dtype in dtypes.items()}
    rows["targets"] -= 1
    for row, (prompt, new) in enumerate(texts):
        text = np.concatenate([prompt, new])
        length = len(text) - 1
        rows["tokens"][row, :length] = text[:-1]
        rows["targets"][row, :length] = text[1:]
        rows["weights"][row, len(prompt) - 1 : length] = 1
        rows["segment_ids"][row, :length] = 1
        rows["positions"][row, :length] = np.arange(length)
    return rows


def _check_rollouts(
    mask: Bool[np.ndarray, "prompts prompt"],
    tokens: Integer[np.ndarray, "rows new"],
    log_probs: Float[np.ndarray, "rows new"],
    advantages: Float[np.ndarray, "prompts samples"],
) -> None:
    """**Raises** `ValueError` for rollouts that do not fit one another."""
    if len(mask) != len(advantages) or len(tokens) != advantages.size:
        raise ValueError(
            f"{len(mask)} prompts, {len(tokens)} completions and advantages of shape {advantages.shape} do not fit: "
            'advantages are "prompts samples", and completions as many as both multiply to'
        )
    if len(faulty := np.flatnonzero(~mask[:, -1] | (np.diff(mask.astype(int), axis=1) < 0).any(axis=1))):
        raise ValueError(f"prompt {faulty[0]} is empty, or padded on the right: prompts are padded on the left")
    is_new = tokens >= 0
    if len(faulty := np.flatnonzero(~is_new[:, 0] | (np.diff(is_new.astype(int), axis=1) > 0).any(axis=1))):
        raise ValueError(f"completion {faulty[0]} is empty, or has tokens after its end: -1 is only behind a text")
    for name, values in (("the advantage", advantages.reshape(-1)), ("a log-probability", log_probs)):
        is_finite = np.isfinite(values).reshape(len(tokens), -1).all(axis=1)
        if not is_finite.all():
            raise ValueError(f"{name} of completion {np.flatnonzero(~is_finite)[0]} is not finite")
