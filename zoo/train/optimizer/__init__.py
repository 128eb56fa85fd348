"""Optimizers: AdamW with moments in few bytes, which parameters decay, and updates that are rounded stochastically."""

from .adam import adamw, scale_by_adam
from .apply_updates import apply_updates
from .masks import decay_mask, matrix_mask
from .moments import BFloat16Moment, BlockwiseMoment, FactoredMoment, Float32Moment

__all__ = [
    "BFloat16Moment",
    "BlockwiseMoment",
    "FactoredMoment",
    "Float32Moment",
    "adamw",
    "apply_updates",
    "decay_mask",
    "matrix_mask",
    "scale_by_adam",
]
