"""Losses of preference pairs and of single texts with a label: functions of log-probabilities, summed or averaged over
the completion of each text.

    ratio = zoo.log_probs(model, batch) - lax.stop_gradient(zoo.log_probs(reference, batch))
    pairs = train.sum_pairs(ratio, batch)
    losses = train.objectives.dpo(pairs.chosen, pairs.rejected, beta=0.1)
    return (losses * pairs.mask).sum(), pairs.mask.sum()

c and d stand for the chosen and the rejected text. "Log-ratio" is log p of the policy minus log p of the reference.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

_Number = float | Float[Array, ""]
_LARGEST_LOG_PROB = -1e-6
"""log p is cut off here before its odds are taken: at 0 they are infinite."""


def dpo(
    chosen: Float[Array, "*pairs"],
    rejected: Float[Array, "*pairs"],
    *,
    beta: _Number = 0.1,
    label_smoothing: _Number = 0.0,
) -> Float[Array, "*pairs"]:
    """Compute -(1 - e) log sigmoid(r) - e log sigmoid(-r), with r = beta (c - d).

    Direct preference optimization (Rafailov et al., arXiv:2305.18290, equation 7). With `label_smoothing` e, the odds
    that a label is flipped, it is cDPO (Mitchell, 2023).

    - `chosen`, `rejected`: log-ratios, summed over each completion. Averaged, it is length-normalized DPO. Of log p
      instead of log-ratios it is CPO (arXiv:2401.08417).
    """
    logits = beta * (chosen - rejected)
    kept = (1 - label_smoothing) * jax.nn.log_sigmoid(logits)
    return -kept - label_smoothing * jax.nn.log_sigmoid(-logits)


def robust_dpo(
    chosen: Float[Array, "*pairs"],
    rejected: Float[Array, "*pairs"],
    *,
    beta: _Number = 0.1,
    label_smoothing: _Number = 0.1,
) -> Float[Array, "*pairs"]:
    """Compute (-(1 - e) log sigmoid(r) + e log sigmoid(-r)) / (1 - 2e), with r = beta (c - d).

    An unbiased estimate of `dpo` where labels are flipped with odds e, `label_smoothing`, below 0.5 (Ray Chowdhury et
    al., arXiv:2403.00409).

    - `chosen`, `rejected`: log-ratios, summed over each completion.
    """
    logits = beta * (chosen - rejected)
    kept = (1 - label_smoothing) * jax.nn.log_sigmoid(logits)
    return (-kept + label_smoothing * jax.nn.log_sigmoid(-logits)) / (1 - 2 * label_smoothing)


def ipo(
    chosen: Float[Array, "*pairs"], rejected: Float[Array, "*pairs"], *, beta: _Number = 0.1
) -> Float[Array, "*pairs"]:
    """Compute (c - d - 1 / (2 beta))² (IPO, Azar et al., arXiv:2310.12036, equation 17).

    - `chosen`, `rejected`: log-ratios, averaged over each completion, as in TRL.
    """
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def hinge(
    chosen: Float[Array, "*pairs"], rejected: Float[Array, "*pairs"], *, beta: _Number = 0.1
) -> Float[Array, "*pairs"]:
    """Compute max(0, 1 - beta (c - d)): the hinge loss of SLiC-HF (Zhao et al., arXiv:2305.10425) on log-ratios, as in
    RSO (arXiv:2309.06657).

    - `chosen`, `rejected`: log-ratios, summed over each completion.
    """
    return jax.nn.relu(1 - beta * (chosen - rejected))


def apo_zero(
    chosen: Float[Array, "*pairs"], rejected: Float[Array, "*pairs"], *, beta: _Number = 0.1
) -> Float[Array, "*pairs"]:
    """Compute 1 - sigmoid(beta c) + sigmoid(beta d) (APO-zero, D'Oosterlinck et al., arXiv:2408.06266, section 3): the
    chosen text becomes likelier, the rejected one less likely.

    - `chosen`, `rejected`: log-ratios, summed over each completion.
    """
    return 1 - jax.nn.sigmoid(beta * chosen) + jax.nn.sigmoid(beta * rejected)


def apo_down(
    chosen: Float[Array, "*pairs"], rejected: Float[Array, "*pairs"], *, beta: _Number = 0.1
) -> Float[Array, "*pairs"]:
    """Compute sigmoid(beta c) + 1 - sigmoid(beta (c - d)) (APO-down, D'Oosterlinck et al., arXiv:2408.06266, section
    3): both texts become less likely, the rejected one more so. For pairs that the model already beats.

    - `chosen`, `rejected`: log-ratios, summed over each completion.
    """
    return jax.nn.sigmoid(beta * chosen) + 1 - jax.nn.sigmoid(beta * (chosen - rejected))


def simpo(
    chosen: Float[Array, "*pairs"], rejected: Float[Array, "*pairs"], *, beta: _Number = 2.0, gamma: _Number = 1.0
) -> Float[Array, "*pairs"]:
    """Compute -log sigmoid(beta (c - d) - gamma) (SimPO, Meng et al., arXiv:2405.14734, equation 6). It needs no
    reference.

    - `chosen`, `rejected`: log p, averaged over each completion.
    """
    return -jax.nn.log_sigmoid(beta * (chosen - rejected) - gamma)


def orpo(
    chosen: Float[Array, "*pairs"], rejected: Float[Array, "*pairs"], *, beta: _Number = 0.1
) -> Float[Array, "*pairs"]:
    """Compute -beta log sigmoid(log odds(c) - log odds(d)), with odds = p / (1 - p) (ORPO, Hong et al.,
    arXiv:2403.07691, equation 7). Add the cross-entropy of the chosen text. It needs no reference.

    - `chosen`, `rejected`: log p, averaged over each completion.
    """
    return -beta * jax.nn.log_sigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(log_p: Float[Array, "*pairs"]) -> Float[Array, "*pairs"]:
    return log_p - jnp.log(-jnp.expm1(jnp.minimum(log_p, _LARGEST_LOG_PROB)))


def kto(
    ratios: Float[Array, "*texts"],
    desirable: Bool[Array, "*texts"],
    divergence: _Number,
    *,
    beta: _Number = 0.1,
    desirable_weight: _Number = 1.0,
    undesirable_weight: _Number = 1.0,
) -> Float[Array, "*texts"]:
    """Compute w_c (1 - sigmoid(beta (x - z))) of a desirable text, and w_d (1 - sigmoid(beta (z - x))) of another
    (KTO, Ethayarajh et al., arXiv:2402.01306).

    - `ratios`: log-ratios x, summed over each completion.
    - `divergence`: z, an estimate of KL(policy | reference), at least 0 and without a gradient: the mean log-ratio of
      completions paired with prompts of other completions. Compute it before the step, with `zoo.value`, and pass it
      in: inside the loss it is a mean over one micro-batch.
    """
    good = desirable_weight * (1 - jax.nn.sigmoid(beta * (ratios - divergence)))
    bad = undesirable_weight * (1 - jax.nn.sigmoid(beta * (divergence - ratios)))
    return jnp.where(desirable, good, bad)
