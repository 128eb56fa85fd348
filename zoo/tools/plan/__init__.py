"""Memory, traffic and time of a step on any mesh of any chips, before it is launched."""

from .chips import CHIPS, Chip
from .compiled import compile_training
from .format import format_plan
from .links import Transfer, time_transfer
from .search import Candidate, make_stand_in_mesh, plan_training, search_meshes, suggest_mesh
from .step import BudgetError, Plan, plan
from .training import TrainingOptions, count_model_flops, make_training_step

__all__ = [
    "CHIPS",
    "BudgetError",
    "Candidate",
    "Chip",
    "Plan",
    "TrainingOptions",
    "Transfer",
    "compile_training",
    "count_model_flops",
    "format_plan",
    "make_stand_in_mesh",
    "make_training_step",
    "plan",
    "plan_training",
    "search_meshes",
    "suggest_mesh",
    "time_transfer",
]
