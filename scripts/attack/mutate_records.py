"""Attack the readers of records: mutated files of each format, read unit by unit.

    python scripts/attack/mutate_records.py                      # 500 mutations, some seconds
    python scripts/attack/mutate_records.py --cases 5000 --seed 1

Each case flips a bit, cuts out or doubles a piece, or writes another piece into one file. A file is refused by one line
with its name, or read: each line of JSON is a fault, or the record that `json.loads` makes of it. Formats without their
package are left out. Exits 1 if any outcome is a forbidden one.
"""

import gzip
import importlib.util
import json
import random
import re
import tempfile
import traceback
from pathlib import Path
from typing import Any

from scripts.attack.watched import HANG, LARGE, RAW, attack, parse_options

SECONDS = 20
REFUSED, EQUAL, FAULTS, DIFFERENT, WRONG = "refused by name", "reads equal", "with faults", "other records", "wrong"
"""`FAULTS`: some records are, and the others as written. `WRONG`: a line that `json.loads` reads otherwise."""
OUTCOMES = (REFUSED, EQUAL, FAULTS, DIFFERENT, WRONG, RAW, HANG, LARGE)
KINDS = ("bit", "cut", "double", "junk")
JUNK = (
    *(b"", b"\0", b"\xff", b"\n", b"\r", b"}\n{", b"[", b"[" * 5000, b'"', b"\\", b"\\ud83d", "\u2028".encode()),
    *(b"NaN", b"-Infinity", b"1e999", b"1" * 5000, b'"role": 1, "role": 2, ', b"\xef\xbb\xbf", b"\xed\xa0\x80"),
)
ROWS = [
    {"messages": [{"role": "user", "content": f"naïve \u2028 {number}"}, {"role": "assistant", "content": None}]}
    for number in range(40)
]
_originals: dict[Path, list[Any]] = {}


def make_files(directory: Path) -> list[Path]:
    """Write a folder per format, with one file each."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
    contents = {
        "a.jsonl": lines,
        "b.jsonl": b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode() + b"\r\n\n" + lines.rstrip(),
        "a.json": json.dumps(ROWS, indent=1).encode(),
        "b.json": lines,
        "a.jsonl.gz": gzip.compress(lines),
    }
    if importlib.util.find_spec("pyarrow"):
        import pyarrow

        contents["a.jsonl.zst"] = pyarrow.compress(lines, codec="zstd", asbytes=True)
    paths = [directory / name.replace(".", "_") / name for name in contents]
    for path in paths:
        path.parent.mkdir()
        path.write_bytes(contents[path.name])
    for suffix in ("parquet", "arrow", "array_record"):
        path = directory / suffix / f"a.{suffix}"
        if _write_binary(path, lines):
            paths.append(path)
    return [path.parent for path in paths]


def _write_binary(path: Path, lines: bytes) -> bool:
    """Write the rows in the format of the suffix. Returns False if its package is not installed."""
    package = "array_record" if path.suffix == ".array_record" else "pyarrow"
    if importlib.util.find_spec(package) is None:
        return False
    path.parent.mkdir()
    if package == "array_record":
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(path), "group_size:1")
        for line in lines.splitlines():
            writer.write(line)
        writer.close()
        return True
    import pyarrow as pa
    from pyarrow import ipc, parquet

    table = pa.Table.from_pylist(ROWS)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=15)
        return True
    with pa.OSFile(str(path), "wb") as sink, ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=15)
    return True


def mutate(content: bytes, kind: str, rng: random.Random) -> bytes:
    """Return a mutated file. Half of them are in its first or last 500 bytes, where headers are."""
    place = rng.choice(["anywhere", "anywhere", "begin", "end"])
    at = rng.randrange(len(content))
    if place == "begin":
        at = rng.randrange(min(500, len(content)))
    elif place == "end":
        at = len(content) - 1 - rng.randrange(min(500, len(content)))
    if kind == "bit":
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    if kind == "cut":
        return content[:at] + content[rng.choice([len(content), at + 1, at + 20]) :]
    if kind == "double":
        return content[:at] + content[max(at - rng.randrange(50), 0) :]
    junk = rng.choice(JUNK)
    return content[:at] + junk + content[at + rng.choice([0, len(junk)]) :]


def read(directory: Path) -> list[tuple[str, Any]]:
    """Read the places and records of a folder; a fault is a `RecordError`."""
    from zoo.text.records.find_files import find_record_files

    found = []
    for file in find_record_files(directory):
        for unit in file.split():
            found += [(file.locate(unit, number), record) for number, record in file.read(unit)]
    return found


def find_wrong_line(path: Path, found: list[tuple[str, Any]]) -> str:
    """Return the first line that is missing, or that `json.loads` reads otherwise; "" for files without lines."""
    from zoo.text.records.record_file import RecordError

    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    if path.suffix not in (".jsonl", ".json", ".gz"):
        return ""
    content = content.removeprefix(b"\xef\xbb\xbf")
    if path.suffix == ".json" and content.lstrip()[:1] == b"[":
        values = enumerate(json.loads(content))
        expected = {f"{path}, element {number}": json.dumps(value).encode() for number, value in values}
    else:
        lines = enumerate(content.split(b"\n"), start=1)
        expected = {f"{path}:{number}": line for number, line in lines if line.strip(b" \t\r")}
    if list(expected) != [place for place, _ in found]:
        return "other places"
    for place, record in found:
        if not isinstance(record, RecordError) and json.loads(expected[place]) != record:
            return f"{place}: {record}"
    return ""


def read_case(case: tuple[Path, Path]) -> tuple[str, str]:
    """Return the outcome of a mutated folder, and a detail."""
    from zoo.text.records.record_file import RecordError

    directory, source = case
    if source not in _originals:
        _originals[source] = [record for _, record in read(source)]
    (path,) = directory.iterdir()
    try:
        found = read(directory)
    except (ValueError, OSError) as error:
        message = str(error)
        is_named = str(path) in message or str(directory) in message
        is_plain = type(error) in (ValueError, FileNotFoundError) and len(message.splitlines()) == 1
        return (REFUSED, message) if is_named and is_plain and len(message) < 1000 else (RAW, traceback.format_exc())
    if wrong := find_wrong_line(path, found):
        return WRONG, wrong
    records = [record for _, record in found]
    faults = [str(record) for record in records if isinstance(record, RecordError)]
    if any("\n" in fault or len(fault) > 1000 or re.search(r"\bat 0x", fault) for fault in faults):
        return RAW, "\n".join(faults)
    if faults:
        return FAULTS, faults[0]
    return (EQUAL, "") if records == _originals[source] else (DIFFERENT, "")


def main() -> int:
    options = parse_options(__doc__, cases=500)
    with tempfile.TemporaryDirectory() as folder:
        sources = make_files(Path(folder))

        def make_case(number: int, rng: random.Random, directory: Path) -> tuple[str, str, Path]:
            source = sources[number % len(sources)]
            (path,) = source.iterdir()
            kind = rng.choice(KINDS)
            directory.mkdir()
            (directory / path.name).write_bytes(mutate(path.read_bytes(), kind, rng))
            return f"{kind}, {path.name}", path.name, source

        return attack(read_case, sources, make_case, options, outcomes=OUTCOMES, num_allowed=4, seconds=SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
