"""Records from files: JSON lines, Parquet, Arrow and ArrayRecord, in units of parallel work, each with its place."""

from .records import Records, RecordSplit, load_records, mix
from .stream import RecordStream, stream_records

__all__ = ["RecordSplit", "RecordStream", "Records", "load_records", "mix", "stream_records"]
