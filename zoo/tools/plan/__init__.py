"""Memory, traffic and time of a step on any mesh of any chips, before it is launched."""

from zoo.inspect.links import time_transfer
from zoo.parallel.chips import CHIPS, Chip

from .ahead import compare_loops
from .compiled import compile_training
from .decoding import plan_decoding, suggest_decoding_mesh
from .format import format_plan
from .options import DecodingOptions, RolloutOptions, TrainingOptions
from .rollouts import count_sampling_memory
from .search import Candidate, plan_training, search_meshes, suggest_mesh
from .step import BudgetError, Overlap, Plan, plan
from .training import count_model_flops

__all__ = [
    "CHIPS",
    "BudgetError",
    "Candidate",
    "Chip",
    "DecodingOptions",
    "Overlap",
    "Plan",
    "RolloutOptions",
    "TrainingOptions",
    "compare_loops",
    "compile_training",
    "count_model_flops",
    "count_sampling_memory",
    "format_plan",
    "plan",
    "plan_decoding",
    "plan_training",
    "search_meshes",
    "suggest_decoding_mesh",
    "suggest_mesh",
    "time_transfer",
]
