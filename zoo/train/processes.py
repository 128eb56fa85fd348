"""Decisions that several processes share. The first process makes them, since one filesystem serves all."""

import builtins
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def run_on_first(function: Callable[[], Any]) -> Any:
    """Call `function` only in the first process; return its result, which is JSON, in every process.

    A collective: all processes call it. **Raises** the exception that `function` raises in the first process, in every
    process. In the others, an exception whose class is not Python's own becomes its nearest base class that is.
    """
    if jax.process_count() == 1:
        return function()
    text, failure, raised = "null", None, None
    if jax.process_index() == 0:
        try:
            text = json.dumps(function())
        except BaseException as error:  # whatever happens, the others wait for the result of this process
            bases = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            failure = [bases, str(error)]
            raised = error
    text, failure = _broadcast_json([text, failure])
    if raised is not None:
        raise raised
    if failure is not None:
        raise _make_exception(*failure)
    return json.loads(text)


def _make_exception(kinds: list[str], text: str) -> BaseException:
    """Return an exception of the first class that takes one text: not every class does, e.g. `UnicodeDecodeError`."""
    for kind in kinds:
        try:
            return getattr(builtins, kind)(text)
        except TypeError:
            continue
    return RuntimeError(text)


def _broadcast_json(value: Any) -> Any:
    """Return the first process's `value` in every process."""
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.array(text.size, np.int32)))
    padded = np.zeros(length, np.uint8)
    padded[: min(length, text.size)] = text[:length]
    return json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))))
