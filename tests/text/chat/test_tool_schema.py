"""Schemas of Python functions are those of transformers 5.24's `get_json_schema`."""

import dataclasses
import enum
from typing import Any, Literal, Optional

import pytest

from zoo.text.chat.tool_schema import tool_schema


def add(x: int, y: float = 1.0) -> float:
    """Add two numbers.

    The second one
    may be left out.

    Args:
        x: The first number,
            on two lines.
        y (float): The second: a fraction.

    Returns:
        The sum.

    Raises:
        ValueError: Never.
    """
    return x + y


def look_up(
    words: list[str],
    table: dict[str, list[int]],
    *,
    order: Literal["up", "down"],
    limit: Optional[int] = None,  # noqa: UP045
    case: bool | None = None,
    rest: dict = {},  # noqa: B006
    more: list = [],  # noqa: B006
    level: Literal[1, 2, "all"] = 1,
) -> None:
    """Look words up.

    Args:
        words: The words.
        table: The table.
        order: The order.
        limit: The limit.
        case: Whether case counts.
        rest: The rest.
        more: More.
        level: The level.
    """


def now():
    """Return the time."""


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.\n\nThe second one\nmay be left out.",
        "parameters": {
            "type": "object",
            "properties": {
                "x": {"type": "integer", "description": "The first number, on two lines."},
                "y": {"type": "number", "description": "The second: a fraction."},
            },
            "required": ["x"],
        },
        "return": {"type": "number", "description": "The sum."},
    },
}
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look words up.",
        "parameters": {
            "type": "object",
            "properties": {
                "words": {"type": "array", "items": {"type": "string"}, "description": "The words."},
                "table": {
                    "type": "object",
                    "additionalProperties": {"type": "array", "items": {"type": "integer"}},
                    "description": "The table.",
                },
                "order": {"type": "string", "enum": ["up", "down"], "description": "The order."},
                "limit": {"type": "integer", "nullable": True, "description": "The limit."},
                "case": {"type": "boolean", "nullable": True, "description": "Whether case counts."},
                "rest": {"type": "object", "description": "The rest."},
                "more": {"type": "array", "description": "More."},
                "level": {"type": ["integer", "string"], "enum": [1, 2, "all"], "description": "The level."},
            },
            "required": ["words", "table", "order"],
        },
        "return": {"type": "null"},
    },
}
NOW = {
    "type": "function",
    "function": {"name": "now", "description": "Return the time.", "parameters": {"type": "object", "properties": {}}},
}
EXPECTED = {add: ADD, look_up: LOOK_UP, now: NOW}


@pytest.mark.parametrize("function", EXPECTED, ids=lambda function: function.__name__)
def test_schema_of_a_function(function):
    assert tool_schema(function) == EXPECTED[function]
    assert list(tool_schema(function)["function"]) == list(EXPECTED[function]["function"])


@pytest.mark.slow
@pytest.mark.neighbors("transformers")
@pytest.mark.parametrize("function", EXPECTED, ids=lambda function: function.__name__)
def test_schemas_are_those_of_transformers(function):
    from transformers.utils import get_json_schema

    assert get_json_schema(function) == EXPECTED[function]


def test_schema_of_a_method():
    class Calculator:
        def double(self, x: int) -> "Calculator":
            """Double a number.

            Args:
                x: The number.
            """
            return self

    Calculator.double.__annotations__["return"] = Calculator
    assert tool_schema(Calculator().double) == {
        "type": "function",
        "function": {
            "name": "double",
            "description": "Double a number.",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer", "description": "The number."}},
                "required": ["x"],
            },
        },
    }


@dataclasses.dataclass
class Point:
    x: int


class Color(enum.Enum):
    RED = "red"


HINTS = (Point, Color, tuple[int, int], int | str, Any, dict[int, str], list[Point], Literal[b"x"], set[int], None)


@pytest.mark.parametrize("hint", HINTS, ids=str)
def test_hints_without_a_schema_name_the_argument(hint):
    def move(where):
        """Move.

        Args:
            where: The place.
        """

    move.__annotations__["where"] = hint
    with pytest.raises(ValueError, match=r"argument 'where' of move has the type hint .*, and a tool takes str, int"):
        tool_schema(move)


def test_what_is_missing_is_named():
    def none(x: int): ...

    def unhinted(x):
        """Do it.

        Args:
            x: A number.
        """

    def undescribed(x: int, y: int):
        """Do it.

        Args:
            x: A number.
        """

    def starred(*numbers: int):
        """Do it.

        Args:
            numbers: Numbers.
        """

    def unknown(x: "Missing"):  # type: ignore[name-defined]
        """Do it."""

    for function, said in [
        (none, "none has no docstring"),
        (unhinted, "argument 'x' of unhinted has no type hint"),
        (undescribed, "argument 'y' of undescribed has no description: write `y: ...` below `Args:`"),
        (starred, "argument 'numbers' of starred cannot be passed by its name"),
        (unknown, "the type hints of unknown cannot be read: name 'Missing' is not defined"),
    ]:
        with pytest.raises(ValueError, match=said):
            tool_schema(function)
