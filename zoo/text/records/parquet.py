"""Parquet: a row group is a unit of work."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from zoo._files import open_regular
from zoo._optional import import_optional

from .arrow import check_columns, convert_rows
from .record_file import INSTALL, RecordError, Unit, name_damage

_BATCH_ROWS = 1024


@dataclass(frozen=True)
class Parquet:
    """A Parquet file, read by row groups. Values come as pyarrow's Python objects: decimals, timestamps, bytes."""

    path: Path
    adds_nulls: ClassVar[bool] = True

    def split(self) -> list[Unit]:
        with self._open() as file:
            # The sizes of columns would be exact, but pyarrow 26 aborts the process over some damaged ones.
            groups = [file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups)]
        scale = self.path.stat().st_size / max(sum(groups), 1)
        return [Unit(index, index + 1, round(scale * size)) for index, size in enumerate(groups)]

    def read(self, unit: Unit) -> Iterator[tuple[int, dict[str, Any] | RecordError]]:
        number = 0
        with self._open() as file:
            groups = range(unit.start, unit.stop)
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups, use_threads=False):
                for row in convert_rows(batch):
                    yield number, row
                    number += 1

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
            check_columns(file.schema_arrow)
            yield file
