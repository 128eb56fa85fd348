"""Exceptions of the first process, as the others raise them."""

import json

import pytest

from zoo.train.processes import _make_exception, run_on_first


class DiskError(PermissionError):
    """An error of a package that the other processes may not have imported."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (DiskError("full"), PermissionError),
        (ValueError("wrong"), ValueError),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "odd"), UnicodeError),
        (json.JSONDecodeError("odd", "x", 0), ValueError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_exceptions_become_their_nearest_builtin(error, kind):
    bases = [base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"]
    made = _make_exception(bases, str(error))
    assert type(made) is kind
    assert str(made) == str(error)


def test_one_process_calls_the_function():
    assert run_on_first(lambda: {"step": 3}) == {"step": 3}
    with pytest.raises(ZeroDivisionError):
        run_on_first(lambda: 1 // 0)
