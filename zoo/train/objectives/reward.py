"""The loss of reward models, of the scores of two answers to one prompt."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def pairwise_reward(
    chosen: Float[Array, "*pairs"],
    rejected: Float[Array, "*pairs"],
    *,
    margin: float | Float[Array, "*pairs"] = 0.0,
    center: float | Float[Array, ""] = 0.0,
) -> Float[Array, "*pairs"]:
    """Compute -log sigmoid(c - d - margin) + center * (c + d)² of the rewards c of chosen and d of rejected answers, in
    float32.

        chosen, rejected = model.score_texts(batch, 2)[..., 0].T  # model: zoo.models.SequenceScore
        losses = train.objectives.pairwise_reward(chosen, rejected)
        return losses.sum(), losses.size

    The Bradley-Terry loss (Ouyang et al., arXiv:2203.02155, equation 1). It knows only differences of rewards.

    - `margin`: by how much the chosen answer is better, one number or one per pair (Llama 2, arXiv:2307.09288, section
      3.2.2).
    - `center`: pulls the mean of both rewards to 0, such as 0.01 (Eisenstein et al., arXiv:2312.09244).
    """
    chosen = chosen.astype(jnp.float32)
    rejected = rejected.astype(jnp.float32)
    return -jax.nn.log_sigmoid(chosen - rejected - margin) + center * (chosen + rejected) ** 2
