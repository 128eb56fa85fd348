"""Objectives of post-training: pure functions of log-probabilities, of scores, and of two models' logits."""

from .distillation import distillation, distillation_terms, distillation_top_k
from .divergence import jensen_shannon
from .hidden_projections import HiddenProjections
from .mixer_matching import mixer_matching
from .policy_gradient import (
    cispo_loss,
    group_advantages,
    is_clipped,
    kl_estimate,
    per_length,
    per_row,
    per_token,
    policy_loss,
    sequence_log_ratio,
    truncate_ratio,
)
from .preference import apo_down, apo_zero, dpo, hinge, ipo, kto, orpo, robust_dpo, simpo
from .reward import pairwise_reward

__all__ = [
    "HiddenProjections",
    "apo_down",
    "apo_zero",
    "cispo_loss",
    "distillation",
    "distillation_terms",
    "distillation_top_k",
    "dpo",
    "group_advantages",
    "hinge",
    "ipo",
    "is_clipped",
    "jensen_shannon",
    "kl_estimate",
    "kto",
    "mixer_matching",
    "orpo",
    "pairwise_reward",
    "per_length",
    "per_row",
    "per_token",
    "policy_loss",
    "robust_dpo",
    "sequence_log_ratio",
    "simpo",
    "truncate_ratio",
]
