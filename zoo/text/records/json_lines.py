"""JSON lines: one object per line, plain or compressed, and files of one array of objects."""

import contextlib
import gzip
import io
import json
import math
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NoReturn

from zoo._files import JSON_BYTES, open_regular, parse_json
from zoo._optional import import_optional
from zoo._terminal import format_bytes

from .record_file import INSTALL, RecordError, Unit, find_record, name_damage, quote

_UNIT_BYTES = 4 * 2**20
_LINE_BYTES = JSON_BYTES
_ARRAY_BYTES = 2**30
_CHUNK_BYTES = 2**20
_BEGIN_BYTES = 2**16
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class JsonLines:
    """A file of JSON lines: `.jsonl` or `.ndjson`, read in byte ranges of about `unit_bytes` that end at line ends.

    - Lines end with `\\n`. Blank lines are skipped, and counted. A byte order mark at the beginning is skipped.
    - `.gz` and `.zst` are one unit.
    - `.json` has one object per line as well, or is one array of objects: one unit, of at most 1 GB.

    A record is faulty if it is not UTF-8, not JSON, not an object, nested more than 100 deep or longer than 100 MB, or
    if it has a number that JSON does not have (NaN, Infinity), a key twice in one object, or half a surrogate pair.
    """

    path: Path
    unit_bytes: int = _UNIT_BYTES
    adds_nulls: ClassVar[bool] = False

    def split(self) -> list[Unit]:
        """**Raises** `ValueError` for a file in UTF-16, a `.json` file of anything else, and as `RecordFile` does."""
        begin = self._read_begin()
        is_array = self._is_array()
        if self._is_json() and not is_array:
            self._check_first_line(begin)
        with open_regular(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            if is_array or self._is_compressed():
                return [Unit(0, size, size)]
            units = []
            start = 0
            while start < size:
                file.seek(min(start + self.unit_bytes, size) - 1)
                _skip_line(file)
                stop = file.tell()
                units.append(Unit(start, stop, stop - start))
                start = stop
        return units

    def read(self, unit: Unit) -> Iterator[tuple[int, dict[str, Any] | RecordError]]:
        if self._is_array():
            yield from self._read_array()
            return
        length = math.inf if self._is_compressed() else unit.stop - unit.start
        with self._open(unit.start) as file:
            for number, line in enumerate(_read_lines(file, length)):
                if unit.start == 0 and number == 0:
                    line = line.removeprefix(_BYTE_ORDER_MARK)
                if line.strip(_SPACE):
                    yield number, _parse_line(line)

    @property
    def finds_records(self) -> bool:
        """True if `read_one` reads no more than a unit of lines, not the whole file."""
        return not self._is_compressed() and not self._is_json()

    def read_one(self, unit: Unit, number: int) -> dict[str, Any]:
        return find_record(self.read(unit), number)

    def locate(self, unit: Unit, number: int) -> str:
        if self._is_array():
            return f"{self.path}, element {number}"
        lines_before = 0
        with open_regular(self.path) as file:
            for start in range(0, unit.start, _CHUNK_BYTES):
                lines_before += file.read(min(_CHUNK_BYTES, unit.start - start)).count(b"\n")
        return f"{self.path}:{lines_before + number + 1}"

    def _read_begin(self) -> bytes:
        """Return the beginning of the file, from the first byte that is not space.

        **Raises** `ValueError` for a file in UTF-16 or UTF-32, in which line ends are no bytes of their own.
        """
        with self._open() as file:
            begin = file.read(_BEGIN_BYTES)
        encoding = json.detect_encoding(begin[:4])
        if any(begin[:4]) and encoding.startswith(("utf-16", "utf-32")):
            name = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
            raise ValueError(
                f"{self.path}: expected UTF-8, and this file is in {name}: `iconv -f {name} -t UTF-8` converts it"
            )
        return begin.removeprefix(_BYTE_ORDER_MARK).lstrip(_SPACE)

    def _is_json(self) -> bool:
        return self.path.name.lower().endswith((".json", ".json.gz", ".json.zst"))

    def _is_compressed(self) -> bool:
        return self.path.suffix.lower() in (".gz", ".zst")

    @contextlib.contextmanager
    def _open(self, start: int = 0) -> Iterator[BinaryIO]:
        """Open the file, decompressed."""
        suffix = self.path.suffix.lower()
        with open_regular(self.path) as file:
            if suffix == ".gz":
                with name_damage(self.path, EOFError, zlib.error), gzip.open(file) as text:
                    yield text  # type: ignore[misc]
            elif suffix == ".zst":
                pyarrow = import_optional("pyarrow", INSTALL)
                with (
                    name_damage(self.path),
                    pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd") as stream,
                ):
                    yield io.BufferedReader(stream)  # type: ignore[misc]
            else:
                file.seek(start)
                yield file

    def _is_array(self) -> bool:
        return self._is_json() and self._read_begin().startswith(b"[")

    def _check_first_line(self, begin: bytes) -> None:
        """**Raises** `ValueError` unless the first line of a `.json` file is an object. Of a longer line only the first
        byte counts."""
        line, line_end, _ = begin.partition(b"\n")
        try:
            is_object = not line or isinstance(parse_json(line), dict)
        except ValueError:
            is_object = line.startswith(b"{") and not line_end
        if not is_object:
            came = quote(line.decode(errors="backslashreplace").rstrip())
            raise ValueError(
                f"{self.path}: expected an object on each line, or one array of objects, and the first line is "
                f"{came}. `jq -c . {self.path}` writes values as lines"
            )

    def _read_array(self) -> Iterator[tuple[int, dict[str, Any] | RecordError]]:
        with self._open() as file:
            content = file.read(_ARRAY_BYTES + 1)
        if len(content) > _ARRAY_BYTES:
            raise ValueError(
                f"{self.path}: expected an array of at most {format_bytes(_ARRAY_BYTES)}. As lines it may be "
                f"larger: `jq -c '.[]' {self.path} > {self.path.stem}.jsonl`"
            )
        try:
            text = content.removeprefix(_BYTE_ORDER_MARK).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: {_describe_bytes(error)}") from None
        decoder = json.JSONDecoder()
        number = 0
        at = _skip_space(text, text.index("[") + 1)
        is_open = not text.startswith("]", at)
        while is_open:
            try:
                _, end = decoder.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                self._raise_bad_array(number, text, at, str(error))
            yield number, parse_or_fault(text[at:end].encode())
            number += 1
            at = _skip_space(text, end)
            is_open = text.startswith(",", at)
            if is_open:
                at = _skip_space(text, at + 1)
        if not text.startswith("]", at):
            self._raise_bad_array(number, text, at, "expected `,` or `]`")
        at = _skip_space(text, at + 1)
        if at < len(text):
            self._raise_bad_array(number, text, at, "expected the end of the file")

    def _raise_bad_array(self, number: int, text: str, at: int, reason: str) -> NoReturn:
        raise ValueError(
            f"{self.path}, element {number}: expected an array of objects, got {quote(text, at)}: {reason}"
        ) from None


def parse_record(content: bytes) -> dict[str, Any]:
    """Parse a JSON object. **Raises** `RecordError` for any of the faults of `JsonLines`."""
    try:
        value = parse_json(content, _make_object, _refuse_constant)
    except UnicodeDecodeError as error:
        raise RecordError(_describe_bytes(error)) from None
    except json.JSONDecodeError as error:
        came = quote(error.doc.rstrip(), error.pos)
        raise RecordError(f"expected JSON, got {came}: {error.msg} at column {error.pos + 1}") from None
    except RecordError:
        raise
    except ValueError as error:  # too deep, or an integer of thousands of digits
        raise RecordError(f"expected JSON within limits, got {quote(content.decode())}: {error}") from None
    if not isinstance(value, dict):
        raise RecordError(f"expected a JSON object, got {quote(content.decode().strip())}")
    if _SURROGATE.search(content):
        _check_surrogates(value)
    return value


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RecordError(f"expected each key once, got {quote(twice)} twice in one object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise RecordError(f"expected a number of JSON, got {name}")


def _check_surrogates(value: dict[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        came = quote(error.object, error.start)
        raise RecordError(f"expected whole characters, got half a surrogate pair in {came}") from None


def _describe_bytes(error: UnicodeDecodeError) -> str:
    begin = error.object[max(error.start - 30, 0) : error.start + 30]
    return (
        f"expected UTF-8, got 0x{error.object[error.start]:02x} as byte {error.start + 1}, in "
        f"{quote(bytes(begin).decode(errors='backslashreplace'))}"
    )


def parse_or_fault(content: bytes) -> dict[str, Any] | RecordError:
    try:
        return parse_record(content)
    except RecordError as fault:
        return fault


def _parse_line(line: bytes) -> dict[str, Any] | RecordError:
    if len(line) > _LINE_BYTES:
        return RecordError(f"expected a line of at most {_LINE_BYTES:,} bytes, got a longer one")
    record = parse_or_fault(line)
    if isinstance(record, RecordError) and not line.endswith(b"\n"):
        return RecordError(f"{record}. The file ends in this line: it may have been cut off")
    return record


def _read_lines(file: BinaryIO, length: float | int) -> Iterator[bytes]:
    """Yield lines with their ends, `length` bytes in all. A line above the limit yields its beginning."""
    while length > 0 and (line := file.readline(_LINE_BYTES + 1)):
        length -= len(line)
        if len(line) > _LINE_BYTES and not line.endswith(b"\n"):
            length -= _skip_line(file)
        yield line


def _skip_line(file: BinaryIO) -> int:
    """Read past the next line end, in limited memory. Returns the number of bytes."""
    length = 0
    while part := file.readline(_CHUNK_BYTES):
        length += len(part)
        if part.endswith(b"\n"):
            break
    return length


def _skip_space(text: str, at: int) -> int:
    found = _SPACES.match(text, at)
    assert found is not None
    return found.end()
