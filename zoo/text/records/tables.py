"""Tables, read by pyarrow: Parquet, and Arrow as the package `datasets` keeps it on disk and in its cache."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from zoo._files import open_regular
from zoo._optional import import_optional

from .record_file import INSTALL, ROWS, RecordError, Unit, find_record, name_damage

_BATCH_ROWS = 1024
_MAGIC = b"ARROW1\0\0"
"""An Arrow file is these bytes, a stream, and an index that is not needed to read it in order."""


@dataclass(frozen=True)
class Parquet:
    """A Parquet file: a row group is a unit. Values come as pyarrow's Python objects: decimals, timestamps, bytes."""

    path: Path
    adds_nulls: ClassVar[bool] = True

    def split(self) -> list[Unit]:
        with self._open() as file:
            # The sizes of columns would be exact, but pyarrow 26 aborts the process over some damaged ones.
            groups = [file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups)]
        scale = self.path.stat().st_size / max(sum(groups), 1)
        return [Unit(index, index + 1, round(scale * size)) for index, size in enumerate(groups)]

    def read(self, unit: Unit) -> Iterator[tuple[int, dict[str, Any] | RecordError]]:
        groups = range(unit.start, unit.stop)
        with self._open() as file:
            batches = file.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups, use_threads=False)
            yield from enumerate(itertools.chain.from_iterable(map(_convert_rows, batches)))

    def read_one(self, unit: Unit, number: int) -> dict[str, Any]:
        with self._open() as file:
            groups = range(unit.start, unit.stop)
            return _find_row(file.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups, use_threads=False), number)

    def locate(self, unit: Unit, number: int) -> str:
        with self._open() as file:
            rows_before = sum(file.metadata.row_group(index).num_rows for index in range(unit.start))
        return f"{self.path}, row {rows_before + number}"

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        pyarrow = import_optional("pyarrow", INSTALL)
        parquet = import_optional("pyarrow.parquet", INSTALL)
        with open_regular(self.path) as content, name_damage(self.path, pyarrow.ArrowException):
            file = parquet.ParquetFile(content, page_checksum_verification=True)
            _check_columns(file.schema_arrow)
            yield file


@dataclass(frozen=True)
class ArrowTable:
    """An Arrow table on disk, a stream or an Arrow file: a unit is some whole record batches, with 4,096 rows or more.

    The file is mapped into memory; a worker touches only its own batches. Values come as pyarrow's Python objects.
    """

    path: Path
    adds_nulls: ClassVar[bool] = True

    def split(self) -> list[Unit]:
        bounds = [0]
        count = 0
        rows = 0
        with self._open() as batches:
            for count, batch in enumerate(batches, start=1):
                rows += batch.num_rows
                if rows >= ROWS:
                    bounds.append(count)
                    rows = 0
        if bounds[-1] < count:
            bounds.append(count)
        size = self.path.stat().st_size
        return [
            Unit(start, stop, size * stop // count - size * start // count)
            for start, stop in itertools.pairwise(bounds)
        ]

    def read(self, unit: Unit) -> Iterator[tuple[int, dict[str, Any] | RecordError]]:
        number = 0
        with self._open() as batches:
            for batch in itertools.islice(batches, unit.start, unit.stop):
                batch.validate(full=True)
                for row in _convert_rows(batch):
                    yield number, row
                    number += 1

    def read_one(self, unit: Unit, number: int) -> dict[str, Any]:
        with self._open() as batches:
            return _find_row(itertools.islice(batches, unit.start, unit.stop), number)

    def locate(self, unit: Unit, number: int) -> str:
        with self._open() as batches:
            rows_before = sum(batch.num_rows for batch in itertools.islice(batches, unit.start))
        return f"{self.path}, row {rows_before + number}"

    @contextlib.contextmanager
    def _open(self) -> Iterator[Iterator[Any]]:
        pyarrow = import_optional("pyarrow", INSTALL)
        ipc = import_optional("pyarrow.ipc", INSTALL)
        open_regular(self.path).close()
        with (
            name_damage(self.path, pyarrow.ArrowException, EOFError, LookupError),
            pyarrow.memory_map(str(self.path)) as file,
        ):
            if file.read(len(_MAGIC)) != _MAGIC:
                file.seek(0)
            reader = ipc.open_stream(file)
            _check_columns(reader.schema)
            yield _walk_batches(reader, file)


def _walk_batches(reader: Any, file: Any) -> Iterator[Any]:
    """Yield the record batches of a stream. **Raises** `ValueError` if the file ends without the mark of its end."""
    end = file.tell()
    for batch in reader:
        end = file.tell()
        yield batch
    if end == file.size():
        raise ValueError("its end mark is missing, as if its writer had been stopped")


def _check_columns(schema: Any) -> None:
    """**Raises** `ValueError` if two columns have one name: a dict would keep the last."""
    twice = {name for name in schema.names if schema.names.count(name) > 1}
    if twice:
        raise ValueError(f"expected each column once, and there are two named {min(twice)!r}")


def _find_row(batches: Iterable[Any], number: int) -> dict[str, Any]:
    """Return the row with a number among record batches. No other row is converted."""
    for batch in batches:
        if number < batch.num_rows:
            return find_record(enumerate(_convert_rows(batch.slice(number, 1))), 0)
        number -= batch.num_rows
    return find_record([], number)


def _convert_rows(batch: Any) -> Iterator[dict[str, Any] | RecordError]:
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
                    f"expected a value that converts to Python in column {field.name!r} ({field.type}): {error}"
                )
        return record

    for start in range(0, batch.num_rows, _BATCH_ROWS):
        try:
            rows = batch.slice(start, _BATCH_ROWS).to_pylist()
        except failures:
            rows = map(convert, range(start, min(start + _BATCH_ROWS, batch.num_rows)))
        yield from rows
