"""Drawings of a model on a mesh (its shards, and what a training step moves between devices), pipelines, attention."""

from typing import TYPE_CHECKING

from zoo._moved import explain_moved_names

from .attention import draw_attention
from .description import describe_layout
from .schedule import draw_schedule
from .svg import draw_layout, render_drawing

__all__ = ["describe_layout", "draw_attention", "draw_layout", "draw_schedule", "render_drawing"]

_PARTS = ("AxisUse", "Drawing", "DrawnParameter", "Group", "Move", "Section")
_MOVED = {name: f"zoo.tools.draw.parts.{name}" for name in _PARTS}
if not TYPE_CHECKING:  # for a type checker every name would be an attribute
    __getattr__ = explain_moved_names(__name__, _MOVED)
