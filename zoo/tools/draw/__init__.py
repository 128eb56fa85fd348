"""Drawings of a model on a mesh (its shards, and what a training step moves between devices), pipelines, attention."""

from .attention import draw_attention
from .description import describe_layout
from .schedule import draw_schedule
from .svg import draw_layout

__all__ = ["describe_layout", "draw_attention", "draw_layout", "draw_schedule"]
