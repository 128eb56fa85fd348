"""Drawings of a model on a mesh (its shards, and what moves between devices in a training step) and of pipelines."""

from .description import describe_layout
from .parts import AxisUse, Drawing, DrawnParameter, Group, Move, Section
from .schedule import draw_schedule
from .svg import draw_layout, render_drawing

__all__ = [
    "AxisUse",
    "Drawing",
    "DrawnParameter",
    "Group",
    "Move",
    "Section",
    "describe_layout",
    "draw_layout",
    "draw_schedule",
    "render_drawing",
]
