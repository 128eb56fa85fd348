"""One trace of several processes, for Perfetto."""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PROCESSES = 10_000
"""Ids that each process has to itself; the profiler's are below 1,000."""


def merge_traces(folder: str | Path) -> Path:
    """Write the newest trace of each process of a run into one file, `perfetto_trace.json.gz` in `folder`; return its
    path.

    `folder` is what `--profile` wrote, with `process_0`, `process_1` and so on in it. Every row is named after its
    process and its host, and ids of rows and flows stay apart. Each process counts time from the start of its trace.
    **Raises** `FileNotFoundError` without such traces.
    """
    folder = Path(folder)
    newest = {}
    pattern = "process_*/plugins/profile/*/perfetto_trace.json.gz"
    for path in sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime):
        newest[int(path.relative_to(folder).parts[0].removeprefix("process_"))] = path
    if not newest:
        raise FileNotFoundError(f"{folder}: expected traces of several processes, {pattern}, and there are none")
    merged = folder / "perfetto_trace.json.gz"
    with gzip.open(merged, "wt", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
        file.write(
            ",\n".join(json.dumps(event) for number in sorted(newest) for event in _read_events(newest[number], number))
        )
        file.write("\n]}\n")
    return merged


def _read_events(path: Path, number: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a process, with ids and names of its own."""
    host = next((file.name.removesuffix(".xplane.pb") for file in path.parent.glob("*.xplane.pb")), "")
    title = f"process {number}, {host}" if host else f"process {number}"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    for event in events:
        if "pid" not in event:  # the last one is empty
            continue
        event["pid"] += number * _PROCESSES
        if event.get("name") == "process_name":
            event["args"]["name"] = f"{title}: {event['args']['name']}"
        if event.get("name") == "process_sort_index":
            event["args"]["sort_index"] += number * _PROCESSES
        for name in event.keys() & {"id", "bind_id"}:
            event[name] = _shift_id(event[name], number)
        yield event


def _shift_id(value: int | str, number: int) -> str:
    """Return another id of 64 bits for each process; of a word, the word with the number."""
    if isinstance(value, str) and not re.fullmatch(r"0x[0-9a-f]+|\d+", value):
        return f"{number}:{value}"
    if isinstance(value, str):
        value = int(value, 0)
    return hex((value + number * 0x9E3779B97F4A7C15) % 2**64)
