"""Arrow: a stream, as the package `datasets` keeps it on disk and in its cache, or an Arrow file."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from zoo._files import open_regular
from zoo._optional import import_optional

from .record_file import INSTALL, ROWS, RecordError, Unit, name_damage

_BATCH_ROWS = 1024
_MAGIC = b"ARROW1\0\0"
"""An Arrow file is these bytes, a stream, and an index that is not needed to read it in order."""


@dataclass(frozen=True)
class ArrowTable:
    """An Arrow table on disk, in byte ranges of whole record batches with 4,096 rows or more.

    The file is mapped into memory; a worker touches only its own ranges. Values come as pyarrow's Python objects.
    """

    path: Path
    adds_nulls: ClassVar[bool] = True

    def split(self) -> list[Unit]:
        units = []
        start = None
        rows = 0
        with self._open() as (file, schema):
            for begin, stop, message in _walk_messages(file, file.size()):
                if start is None:
                    start = begin
                rows += _read_batch(message, schema).num_rows
                if rows >= ROWS:
                    units.append(Unit(start, stop, stop - start))
                    start = None
                    rows = 0
            if start is not None:
                stop = file.tell()
                units.append(Unit(start, stop, stop - start))
        return units

    def read(self, unit: Unit) -> Iterator[tuple[int, dict[str, Any] | RecordError]]:
        number = 0
        with self._open() as (file, schema):
            file.seek(unit.start)
            for _, _, message in _walk_messages(file, unit.stop):
                batch = _read_batch(message, schema)
                batch.validate(full=True)
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    for row in convert_rows(batch.slice(start, _BATCH_ROWS)):
                        yield number, row
                        number += 1

    def locate(self, unit: Unit, number: int) -> str:
        with self._open() as (file, schema):
            before = _walk_messages(file, unit.start)
            rows_before = sum(_read_batch(message, schema).num_rows for _, _, message in before)
        return f"{self.path}, row {rows_before + number}"

    @contextlib.contextmanager
    def _open(self) -> Iterator[tuple[Any, Any]]:
        """Open the file and skip its schema."""
        pyarrow = import_optional("pyarrow", INSTALL)
        ipc = import_optional("pyarrow.ipc", INSTALL)
        open_regular(self.path).close()
        with (
            name_damage(self.path, pyarrow.ArrowException, EOFError, LookupError),
            pyarrow.memory_map(str(self.path)) as file,
        ):
            if file.read(len(_MAGIC)) != _MAGIC:
                file.seek(0)
            schema = ipc.read_schema(file)
            check_columns(schema)
            yield file, schema


def _walk_messages(file: Any, stop: int) -> Iterator[tuple[int, int, Any]]:
    """Yield begin, end and message of each record batch up to byte `stop`, or to the end of the stream."""
    ipc = import_optional("pyarrow.ipc", INSTALL)
    reader = ipc.MessageReader.open_stream(file)
    while (begin := file.tell()) < stop:
        try:
            message = reader.read_next_message()
        except StopIteration:
            return
        if message.type != "record batch":
            raise ValueError(f"record batches were expected, and a message of type {message.type} came")
        yield begin, file.tell(), message
    if stop == file.size():
        raise ValueError("its end mark is missing, as if its writer had been stopped")


def _read_batch(message: Any, schema: Any) -> Any:
    return import_optional("pyarrow.ipc", INSTALL).read_record_batch(message, schema)


def check_columns(schema: Any) -> None:
    """**Raises** `ValueError` if two columns have one name: a dict would keep the last."""
    twice = {name for name in schema.names if schema.names.count(name) > 1}
    if twice:
        raise ValueError(f"each column once was expected, and there are two named {min(twice)!r}")


def convert_rows(batch: Any) -> list[dict[str, Any] | RecordError]:
    """Convert a record batch of pyarrow to dicts. A row that Python has no value for becomes a fault."""
    pyarrow = import_optional("pyarrow", INSTALL)
    failures = (ValueError, ArithmeticError, pyarrow.ArrowException)

    def convert(row: int) -> dict[str, Any] | RecordError:
        record = {}
        for field, column in zip(batch.schema, batch.columns, strict=True):
            try:
                record[field.name] = column[row].as_py()
            except failures as error:
                return RecordError(
                    f"a value that converts to Python was expected in column {field.name!r} ({field.type}): {error}"
                )
        return record

    try:
        return batch.to_pylist()
    except failures:
        return [convert(row) for row in range(batch.num_rows)]
