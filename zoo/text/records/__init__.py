"""Records from files: JSON lines, Parquet, Arrow and ArrayRecord, in units of parallel work, each with its place."""
