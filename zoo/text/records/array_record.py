"""ArrayRecord: a file of byte strings with random access, each a JSON object here."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from zoo._files import open_regular
from zoo._optional import import_optional

from .json_lines import parse_or_fault
from .record_file import ROWS, RecordError, Unit, find_record, name_damage

_BATCH_ROWS = 256


@dataclass(frozen=True)
class ArrayRecords:
    """An ArrayRecord file, in units of 4,096 records. Each record is a JSON object in UTF-8."""

    path: Path
    adds_nulls: ClassVar[bool] = False

    def split(self) -> list[Unit]:
        units = []
        with self._open() as source:
            size = os.stat(self.path).st_size
            for start in range(0, len(source), ROWS):
                stop = min(start + ROWS, len(source))
                units.append(Unit(start, stop, size * stop // len(source) - size * start // len(source)))
        return units

    def read(self, unit: Unit) -> Iterator[tuple[int, dict[str, Any] | RecordError]]:
        number = 0
        with self._open() as source:
            for start in range(unit.start, unit.stop, _BATCH_ROWS):
                for content in source.__getitems__(range(start, min(start + _BATCH_ROWS, unit.stop))):
                    yield number, parse_or_fault(content)
                    number += 1

    def read_one(self, unit: Unit, number: int) -> dict[str, Any]:
        start = unit.start + number
        return find_record(self.read(Unit(start, start + 1, 0)), 0)

    def locate(self, unit: Unit, number: int) -> str:
        return f"{self.path}, record {unit.start + number}"

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        sources = import_optional("grain.sources", "pip install 'equizoo[train]'")
        open_regular(self.path).close()
        with name_damage(self.path, RuntimeError), sources.ArrayRecordDataSource(self.path) as source:
            yield source
