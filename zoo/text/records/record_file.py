"""The interface of a file of records: units of parallel work, the records of each, and their places."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

INSTALL = "pip install 'equizoo[data]'"
ROWS = 4096
"""Rows of a unit, where the format has no parts of its own."""


class RecordError(ValueError):
    """A fault of one record. The message says what was expected and what came, without the place."""


class Unit(NamedTuple):
    """A part of a file that one worker reads: `start` to `stop` in bytes, rows or row groups, as the format has it.

    `num_bytes` is its share of the file, for a progress bar.
    """

    start: int
    stop: int
    num_bytes: int


@runtime_checkable
class RecordFile(Protocol):
    """A file of records. It holds a path and no open file: workers get it pickled.

    **Raises** `ValueError` with the path for a file that is damaged, `OSError` for one that cannot be opened,
    `ImportError` if the package that reads the format is not installed.
    """

    adds_nulls: ClassVar[bool]
    """True for rows of tables: all structs of a column have the same keys, and absent ones come as null."""

    @property
    def path(self) -> Path: ...

    def split(self) -> list[Unit]:
        """Return the units in their order. Together they hold every record once."""
        ...

    def read(self, unit: Unit) -> Iterator[tuple[int, dict[str, Any] | RecordError]]:
        """Yield each record of a unit, or its fault, with its number within the unit. Goes on after a fault."""
        ...

    def read_one(self, unit: Unit, number: int) -> dict[str, Any]:
        """Return a record that `read` yielded with this number."""
        ...

    def locate(self, unit: Unit, number: int) -> str:
        """Return the place of a record: `chats.jsonl:1042`, with lines from 1, or `chats.parquet, row 1042`, from 0."""
        ...


def find_record(records: Iterable[tuple[int, dict[str, Any] | RecordError]], number: int) -> dict[str, Any]:
    """Return the record with a number. **Raises** `ValueError` for records that do not have it any more."""
    record = next((record for found, record in records if found == number), None)
    if not isinstance(record, dict):
        raise ValueError(f"record {number} of its unit is not there any more")
    return record


@contextlib.contextmanager
def name_damage(path: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Turn `OSError`, `ValueError` and `kinds` of a reader into a `ValueError` with the path, on one line."""
    try:
        yield
    except (OSError, ValueError, *kinds) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{path} is damaged: {lines[0][:300]}") from None


def drop_nulls(value: Any) -> Any:
    """Leave out keys of mappings with the value None, at any depth. Elements of lists stay."""
    if isinstance(value, Mapping):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    return value


def quote(text: str, at: int = 0) -> str:
    """Quote a text of unknown length: up to 60 characters around the place `at`."""
    start = max(at - 30, 0)
    before = "..." if start else ""
    after = "..." if len(text) > start + 60 else ""
    return f"{before}{text[start : start + 60]!r}{after}"
