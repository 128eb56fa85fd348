"""Kinds of values accept their own JSON type alone, and say in words what was expected."""

import pytest

from zoo.models.hf.values import (
    BOOL,
    NON_NEGATIVE_NUMBER,
    NUMBER,
    POSITIVE_NUMBER,
    WORD,
    integer,
    is_any_of,
    list_of,
    optional,
    table_of,
)

KINDS = {
    "bool": (BOOL, [True, False], ["false", 0, 1, None, [1]]),
    "number": (NUMBER, [0, -1.5, 1e6], [True, "1", float("nan"), float("inf"), 10**400, None]),
    "positive number": (POSITIVE_NUMBER, [1, 1e-9], [0, -1, True, "1", float("inf")]),
    "number from 0": (NON_NEGATIVE_NUMBER, [0, 2.5], [-1e-9, float("nan"), False]),
    "word": (WORD, ["", "silu"], [None, 1, ["silu"]]),
    "integer": (integer(), [-3, 0, 2**31], [1.0, True, "1", 2**31 + 1]),
    "count": (integer(minimum=1), [1], [0, -1, True, 1.0]),
    "list": (list_of(integer(minimum=0)), [[], [0, 2]], [[True], [-1], {0: 1}, "02", None]),
    "table": (table_of(NUMBER), [{}, {"q": 2}], [{"q": True}, [2], "q"]),
    "null": (optional(BOOL), [None, True], [0, "null"]),
}


@pytest.mark.parametrize(("kind", "right", "wrong"), KINDS.values(), ids=KINDS)
def test_value_kind_accepts_its_own_type(kind, right, wrong):
    assert [kind.find_error(value) for value in right] == [""] * len(right)
    assert all(kind.find_error(value) == f"should be {kind.words}" for value in wrong)


def test_value_kind_in_words():
    assert optional(list_of(integer(minimum=0))).words == (
        "null or a list of whole numbers not below 0, and not beyond 2 ** 31"
    )
    assert table_of(POSITIVE_NUMBER).words == "a table of names and numbers above 0"


def test_any_of_compares_types():
    assert is_any_of(1, (1.0, None)) and is_any_of(None, (1.0, None)) and is_any_of({}, ({}, None))
    assert not is_any_of(0, (False,)) and not is_any_of(True, (1,)) and not is_any_of([0], (0,))
