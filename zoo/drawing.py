"""Moved to `zoo.tools.draw`."""

raise ImportError("zoo.drawing has moved to zoo.tools.draw: from zoo.tools.draw import draw_layout")
