"""Records in memory: a sequence of mappings."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from zoo._files import to_jsonable

from .record_file import RecordError, Unit


@dataclass(frozen=True)
class InMemory:
    """Records in memory, read like a file."""

    records: Sequence[Mapping[str, Any]]
    path: Path = Path("records")
    adds_nulls: ClassVar[bool] = True
    """They may be the rows of a table, `dataset.to_list()`."""

    def split(self) -> list[Unit]:
        """Return one unit: to send records to workers takes longer than to encode them."""
        return [Unit(0, len(self.records), 0)]

    def read(self, unit: Unit) -> Iterator[tuple[int, dict[str, Any] | RecordError]]:
        """Yield the number within the unit and the record, or its fault."""
        for number, record in enumerate(self.records[unit.start : unit.stop]):
            if isinstance(record, Mapping):
                yield number, dict(record)
            else:
                yield number, RecordError(f"the record is of type {type(record).__name__}, not a mapping")

    def read_one(self, unit: Unit, number: int) -> dict[str, Any]:
        """Return a record of a unit."""
        return dict(self.records[unit.start + number])

    def locate(self, unit: Unit, number: int) -> str:
        """Return the place of a record: `record 17`, counted from 0 as in a list."""
        return f"record {unit.start + number}"

    def digest(self) -> str:
        """Return a hash of all records."""
        total = hashlib.blake2b(digest_size=16)
        for record in self.records:
            total.update(json.dumps(to_jsonable(record), ensure_ascii=True).encode() + b"\n")
        return total.hexdigest()
