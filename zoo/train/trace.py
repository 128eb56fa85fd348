"""Perfetto traces whose slices are named after the source.

JAX's profiler writes two files: `*.xplane.pb`, for XProf and TensorBoard, and `*.trace.json.gz`, for Perfetto. The
latter names operations as XLA does, `fusion.12`. The former also holds the compiled programs with the scope of each
operation (`zoo.parallel.scope`), which this module copies into the latter.
"""

import gzip
import json
import re
from collections.abc import Iterator, Set
from pathlib import Path

from zoo._files import create_files

_TRANSFORM_PATTERN = re.compile(r"(\w+)\((.*)\)")
_JAX_SCOPES = {
    *("jit", "pjit", "shard_map", "while", "body", "cond"),
    *("closed_call", "eval_jaxpr", "checkpoint", "rematted_computation"),
}
"""Scopes added by JAX."""


def write_perfetto_trace(directory: Path) -> Path:
    """Write `perfetto_trace.json.gz` next to the newest trace in `directory`, and return its path.

    Drops the metadata at the end of JAX's file, which Perfetto cannot read.
    """
    folder = max((Path(directory) / "plugins" / "profile").iterdir(), key=lambda path: path.stat().st_mtime)
    (file,) = folder.glob("*.trace.json.gz")
    with gzip.open(file, "rt", encoding="utf-8") as source:
        events = json.load(source)["traceEvents"]
    program = lambda event: (event.get("args") or {}).get("hlo_module", "").partition("(")[0]
    ran = {program(event) for event in events}  # the file holds every program that the process ever compiled
    scopes: dict[tuple[str, str], set[str]] = {}
    for file in folder.glob("*.xplane.pb"):
        for module, name, scope in read_operations(file.read_bytes(), ran):
            scopes.setdefault((module, name), set()).add(scope)
    for event in events:
        inside = event.get("args") or {}
        known = scopes.get((program(event), inside.get("hlo_op", "")), ())
        if len(known) == 1:  # ambiguous if two programs share their name and that of an operation
            (scope,) = known
            event["args"] = inside | {"scope": scope, "operation": event["name"]}
            event["name"] = format_scope(scope)
    path = folder / "perfetto_trace.json.gz"
    with create_files(folder) as create, gzip.open(create(path.name), "wt", encoding="utf-8") as target:
        json.dump({"displayTimeUnit": "ns", "traceEvents": events}, target)
    return path


def format_scope(scope: str) -> str:
    """Format the name scope of an operation: `backward Decoder/stack/Block/mixer.Attention/query/dot_general`.

    Prefixed with "backward" in the backward pass, and with "recomputed" if rematerialized there.
    """
    words, when = [], ""
    for word in re.split(r"/(?![^(]*\))", scope):
        when = "recomputed " if word == "rematted_computation" else when
        while found := _TRANSFORM_PATTERN.fullmatch(word):
            when = when or ("backward " if found[1] == "transpose" else "")
            word = found[2] if found[1] not in _JAX_SCOPES else ""
        if word and word not in _JAX_SCOPES:
            words.append(word)
    return when + "/".join(words)


def read_operations(profile: bytes, programs: Set[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the program, name and scope of every operation of `programs` in an XSpace protocol buffer.

    Field numbers are those of `xplane.proto` and `hlo.proto`: plane 1, event_metadata 4 with value 2, stats 5 with
    bytes_value 6; hlo_module 1 with name 1, computations 3, instructions 2 with name 1 and metadata 7 with op_name 2.
    """
    for plane in read_fields(profile, 1):
        if next(read_fields(plane, 2), b"") != b"/host:metadata":
            continue
        for program in _read_nested_fields(plane, 4, 2, 5, 6, 1):
            module = next(read_fields(program, 1), b"").decode()
            if module not in programs:
                continue
            for instruction in _read_nested_fields(program, 3, 2):
                name, scope = next(read_fields(instruction, 1), b""), next(_read_nested_fields(instruction, 7, 2), b"")
                if scope:
                    yield module, name.decode(), scope.decode()


def _read_nested_fields(message: bytes, first: int, *path: int) -> Iterator[bytes]:
    for value in read_fields(message, first):
        if path:
            yield from _read_nested_fields(value, *path)
        else:
            yield value


def read_fields(message: bytes, number: int) -> Iterator[bytes]:
    """Yield the values of one length-delimited field of a protocol buffer."""
    offset = 0
    while offset < len(message):
        key, offset = _read_varint(message, offset)
        match key & 7:
            case 0:
                _, offset = _read_varint(message, offset)
            case 1:
                offset += 8
            case 5:
                offset += 4
            case 2:
                size, offset = _read_varint(message, offset)
                if key >> 3 == number:
                    yield message[offset : offset + size]
                offset += size
            case kind:
                raise ValueError(f"not a protocol buffer: a field of kind {kind} at byte {offset}")


def _read_varint(message: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[offset]
        value |= (byte & 127) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 128:
            return value, offset
