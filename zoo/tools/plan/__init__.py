"""Memory, traffic and time of a step on any mesh of any chips, before it is launched."""

from zoo.parallel.chips import CHIPS, Chip

from .decoding import plan_decoding
from .options import DecodingOptions, TrainingOptions
from .search import plan_training, search_meshes
from .step import Plan
from .training import count_model_flops

__all__ = [
    "CHIPS",
    "Chip",
    "DecodingOptions",
    "Plan",
    "TrainingOptions",
    "count_model_flops",
    "plan_decoding",
    "plan_training",
    "search_meshes",
]
