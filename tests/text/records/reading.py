"""Read a whole file of records, unit by unit."""

import pickle
from typing import Any

from zoo.text.records.record_file import RecordError, RecordFile


def read_records(file: RecordFile) -> list[tuple[str, Any]]:
    """The place and the record of each; a fault is its message. Units are read by a copy, as in a worker."""
    copy = pickle.loads(pickle.dumps(file))
    found = []
    for unit in file.split():
        for number, record in copy.read(unit):
            found.append((file.locate(unit, number), str(record) if isinstance(record, RecordError) else record))
    return found
