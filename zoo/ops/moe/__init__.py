"""Mixture-of-experts primitives: top-k routing, expert dispatch and combine, grouped matrix products."""

from . import dispatch as dispatch
from . import grouped_matmul as grouped_matmul
from . import routing as routing
