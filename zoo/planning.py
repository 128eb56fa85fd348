"""Moved to `zoo.tools.plan`."""

raise ImportError("zoo.planning has moved to zoo.tools.plan; zoo.plan is the function that it was")
