"""Decisions that several processes share: the first process makes them, for one filesystem serves all."""

import builtins
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def run_on_first(function: Callable[[], Any]) -> Any:
    """Call `function` in the first process alone; return its result, which is JSON, in every process.

    A collective: all processes call it. **Raises** in every process if `function` raises an `OSError`, `ValueError` or
    a subclass.
    """
    if jax.process_count() == 1:
        return function()
    result, raised = None, None
    if jax.process_index() == 0:
        try:
            result = function()
        except (OSError, ValueError) as error:
            raised = error
    failure = None if raised is None else [type(raised).__name__, str(raised)]
    result, failure = _broadcast_json([result, failure])
    if raised is not None:
        raise raised
    if failure is not None:
        name, text = failure
        kind = getattr(builtins, name, OSError)
        raise kind(text)
    return result


def _broadcast_json(value: Any) -> Any:
    """Return the first process's `value` in every process."""
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.array(text.size, np.int32)))
    padded = np.zeros(length, np.uint8)
    padded[: min(length, text.size)] = text[:length]
    return json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))))
