"""Policy gradients: advantages, ratios, surrogates and averages, which GRPO and its kin combine.

    log_probs = zoo.log_probs(model, batch, temperature=temperature)
    log_ratio = log_probs - rollouts.log_probs
    losses = train.objectives.policy_loss(log_ratio, rollouts.advantages, clip=(0.2, 0.28))
    return train.objectives.per_token(losses, batch["weights"])

A row is a prompt and one sampled completion; `weights` are 1 on the targets of the completion.

|          | log-ratio | surrogate | average | advantages |
|----------|-----------|-----------|---------|------------|
| GRPO     | of each token | `policy_loss` | `per_row` | of the group, scaled |
| Dr. GRPO | of each token | `policy_loss` | `per_length` | of the group |
| DAPO     | of each token | `policy_loss`, clip (0.2, 0.28) | `per_token` | of the group, scaled |
| GSPO     | `sequence_log_ratio` | `policy_loss`, clip (3e-4, 4e-4) | `per_row` | of the group, scaled |
| CISPO    | of each token | `cispo_loss` | `per_token` | of the group, scaled |
| RLOO     | `sequence_log_ratio`, not normalized | `policy_loss` | `per_row` | of the others in the group |
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from zoo.parallel import reduce

Average = tuple[Float[Array, ""], Float[Array, ""]]
"""A total and a count, as a loss function of `zoo.value_and_grad` returns them."""
_Number = float | Float[Array, ""]


def group_advantages(
    rewards: Float[np.ndarray, "prompts samples"],
    *,
    baseline: Literal["group", "others"] = "group",
    scale: Literal["group", "batch", "none"] = "group",
) -> Float[np.ndarray, "prompts samples"]:
    """Compute the advantage of each sample over the samples of the same prompt, on the host.

    - `baseline`: the mean reward of the "group" (GRPO, Shao et al., arXiv:2402.03300, section 4.1), or of the "others"
      in it (RLOO, Ahmadian et al., arXiv:2402.14740, section 3).
    - `scale`: divide by the standard deviation of the "group" or of the "batch", plus 1e-4; "none" is Dr. GRPO (Liu et
      al., arXiv:2503.20783) and RLOO. The deviation has n - 1 in it, as in TRL.

    A group with equal rewards has advantages of 0.

    **Raises** `ValueError` for fewer than 2 samples per prompt, for rewards that are not finite, and for an unknown
    `baseline` or `scale`.
    """
    rewards = np.asarray(rewards)
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f'expected rewards "prompts samples" of 2 or more samples, got shape {rewards.shape}: the samples '
            "of a prompt are compared with each other"
        )
    if not np.isfinite(rewards).all():
        prompt, sample = np.argwhere(~np.isfinite(rewards))[0]
        raise ValueError(f"the reward of sample {sample} of prompt {prompt} is {rewards[prompt, sample]}")
    if baseline not in ("group", "others"):
        raise ValueError(f"baseline={baseline!r}: expected 'group' or 'others'")
    count = rewards.shape[1]
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    if baseline == "others":
        advantages = advantages * count / (count - 1)
    if scale == "none":
        return advantages
    if scale == "group":
        deviation = rewards.std(axis=1, ddof=1, keepdims=True)
    elif scale == "batch":
        deviation = rewards.std(ddof=1)
    else:
        raise ValueError(f"scale={scale!r}: expected 'group', 'batch' or 'none'")
    return advantages / (deviation + 1e-4)


def sequence_log_ratio(
    log_ratio: Float[Array, "batch seq"], weights: Float[Array, "batch seq"], *, normalized: bool = True
) -> Float[Array, "batch 1"]:
    """Compute the log-ratio of a row's completion: the mean over its tokens (GSPO, Zheng et al., arXiv:2507.18071,
    equation 7). The sum if it is not `normalized`: the log of the ratio of the completion's probabilities (RLOO).
    """
    total = reduce((log_ratio * weights).sum(axis=1, keepdims=True), over="seq")
    if not normalized:
        return total
    return total / _count_tokens(weights)


def policy_loss(
    log_ratio: Float[Array, "batch #seq"],
    advantages: Float[Array, "batch #seq"],
    *,
    clip: tuple[_Number, _Number] = (0.2, 0.2),
) -> Float[Array, "batch _"]:
    """Compute -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A): PPO's clipped surrogate (Schulman et al.,
    arXiv:1707.06347, equation 7), negated.

    - `log_ratio`: log p minus log p when the samples were drawn: of each token, or `sequence_log_ratio` of each row.
    - `clip`: (low, high). DAPO clips higher above, (0.2, 0.28) (Yu et al., arXiv:2503.14476).

    On the first update of a batch take `log_probs - lax.stop_gradient(log_probs)`: the ratio is exactly 1, in any
    dtype, and its gradient is right.
    """
    low, high = clip
    ratio = jnp.exp(log_ratio)
    return -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)


def is_clipped(
    log_ratio: Float[Array, "batch #seq"],
    advantages: Float[Array, "batch seq"],
    *,
    clip: tuple[_Number, _Number] = (0.2, 0.2),
) -> Bool[Array, "batch seq"]:
    """Return True where `policy_loss` is clipped and has no gradient: the ratio has gone far enough already."""
    low, high = clip
    ratio = jnp.exp(log_ratio)
    return ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))


def cispo_loss(
    log_ratio: Float[Array, "batch seq"],
    log_probs: Float[Array, "batch seq"],
    advantages: Float[Array, "batch #seq"],
    *,
    largest: _Number = 5.0,
) -> Float[Array, "batch seq"]:
    """Compute -min(ratio, largest) * A * log p, with a ratio without gradient: every token keeps a gradient (CISPO,
    MiniMax-M1, arXiv:2506.13585)."""
    ratio = jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_ratio), largest))
    return -ratio * advantages * log_probs


def kl_estimate(
    log_probs: Float[Array, "batch seq"], reference: Float[Array, "batch seq"]
) -> Float[Array, "batch seq"]:
    """Compute exp(q - p) - (q - p) - 1 with log p of the policy and log q of the reference: an estimate of
    KL(policy | reference) on samples of the policy, unbiased and never negative (Schulman's k3, 2020)."""
    log_ratio = reference - log_probs
    return jnp.expm1(log_ratio) - log_ratio


def truncate_ratio(
    log_probs: Float[Array, "batch seq"], sampler: Float[Array, "batch seq"], *, largest: _Number = 2.0
) -> Float[Array, "batch seq"]:
    """Compute min(p / q, largest) without gradient, with q the probability that the sampler gave the token.

    A weight of each token's loss, which corrects for a sampler that computes other numbers than training does:
    truncated importance sampling (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
    2025).
    """
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(log_probs - sampler), largest))


def per_token(losses: Float[Array, "batch #seq"], weights: Float[Array, "batch seq"]) -> Average:
    """Return total and count of the mean over the tokens of all completions (DAPO)."""
    return (losses * weights).sum(), weights.sum()


def per_row(losses: Float[Array, "batch #seq"], weights: Float[Array, "batch seq"]) -> Average:
    """Return total and count of the mean over rows of each completion's mean over tokens (GRPO)."""
    shares = weights / _count_tokens(weights)
    return (losses * shares).sum(), shares.sum()


def per_length(losses: Float[Array, "batch #seq"], weights: Float[Array, "batch seq"], length: _Number) -> Average:
    """Return total and count of the mean over rows of each completion's sum, divided by `length`: one number for all,
    the largest number of new tokens (Dr. GRPO)."""
    rows = weights / _count_tokens(weights)  # of one row, they add up to 1 over all devices that hold a part of it
    return (losses * weights).sum() / length, rows.sum()


def _count_tokens(weights: Float[Array, "batch seq"]) -> Float[Array, "batch 1"]:
    """Return the number of tokens of each row's completion, 1 for a row without any."""
    return jnp.maximum(reduce(weights.sum(axis=1, keepdims=True), over="seq"), 1)
