"""Text out of a model: one token after another, with a cache.

`request.py` holds what was asked against the model and lays it out for few compilations; `decode.py` is what then runs,
on one device or on the shares of many; `run.py` joins them.
"""

from .run import generate

__all__ = ["generate"]
