"""Drawings of a model on a mesh: parameters cut into shards, and what moves between devices in a training step."""

from .description import describe_layout
from .parts import AxisUse, Drawing, DrawnParameter, Group, Move, Section
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
    "render_drawing",
]
