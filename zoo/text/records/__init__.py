"""Records from files: JSON lines, Parquet, Arrow and ArrayRecord, in units of parallel work, each with its place."""

from .records import Records, RecordSplit, load_records, mix

__all__ = ["RecordSplit", "Records", "load_records", "mix"]
