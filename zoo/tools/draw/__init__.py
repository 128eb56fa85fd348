"""Pictures of a model on a mesh (its shards, and what a training step moves between devices), pipelines, attention."""

from .attention import draw_attention
from .description import describe_layout
from .layout import draw_layout
from .schedule import draw_schedule

__all__ = ["describe_layout", "draw_attention", "draw_layout", "draw_schedule"]
