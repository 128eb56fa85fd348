"""Traces of several processes in one file: rows, flows and times as each process wrote them, and ids apart."""

import gzip
import json
import os

import jax
import jax.numpy as jnp
import pytest

from zoo import inspect, train


def read(path):
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def write(folder, events, *, host="gpu07", time=1_000_000_000):
    folder.mkdir(parents=True)
    (folder / f"{host}.xplane.pb").touch()
    path = folder / "perfetto_trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"displayTimeUnit": "ns", "traceEvents": [*events, {}]}, file)
    os.utime(path, (time, time))


def make_events(name):
    """Events as JAX's profiler writes them: a row and its place, an operation, and the two ends of a flow."""
    common = {"pid": 3, "tid": 5}
    return [
        {"ph": "M", "pid": 3, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "pid": 3, "name": "process_sort_index", "args": {"sort_index": 3}},
        {"ph": "X", **common, "ts": 1.5, "dur": 2.5, "name": name},
        {"ph": "s", **common, "ts": 1.5, "id": "0xffffffffffffffff", "name": "flow"},
        {"ph": "f", **common, "ts": 3.5, "id": "0xffffffffffffffff", "name": "flow"},
        {"ph": "b", **common, "ts": 3.5, "id": 7, "bind_id": "word", "name": "send"},
    ]


def test_ids_of_processes_stay_apart(tmp_path):
    for number, host in ((0, "gpu07"), (1, "gpu08"), (10, "gpu09")):
        folder = tmp_path / f"process_{number}" / "plugins" / "profile" / "2026_01_31"
        write(folder, make_events(f"fusion.{number}"), host=host)
    write(tmp_path / "process_1" / "plugins" / "profile" / "2026_01_30", make_events("old"), time=1)
    path = inspect.merge_traces(tmp_path)
    assert path == tmp_path / "perfetto_trace.json.gz"
    merged = read(inspect.merge_traces(tmp_path))  # a second call replaces the file
    assert len(merged) == 3 * 6
    rows = {event["pid"]: event["args"]["name"] for event in merged if event["name"] == "process_name"}
    names = [f"process {number}, {host}: /device:GPU:0" for number, host in ((0, "gpu07"), (1, "gpu08"), (10, "gpu09"))]
    assert list(rows.values()) == names and len(rows) == 3
    operations = {event["pid"]: event for event in merged if event["ph"] == "X"}
    assert {event["name"] for event in operations.values()} == {"fusion.0", "fusion.1", "fusion.10"}
    assert all((event["ts"], event["dur"], event["tid"]) == (1.5, 2.5, 5) for event in operations.values())
    flows = [[event["id"] for event in merged if event["ph"] in "sf" and event["pid"] == pid] for pid in rows]
    assert all(start == end for start, end in flows) and len({start for start, _ in flows}) == 3
    assert len({(event["id"], event["bind_id"]) for event in merged if event["ph"] == "b"}) == 3
    places = [event["args"]["sort_index"] for event in merged if event["name"] == "process_sort_index"]
    assert places == sorted(set(places))


def test_traces_of_the_profiler_are_merged(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for index in range(2):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        with train.Profile(tmp_path, print) as profile:
            for number in range(3):
                with profile.step(number):
                    jax.block_until_ready(jnp.ones(3) + number)
    merged = read(inspect.merge_traces(tmp_path))
    steps = [(event["pid"], event["args"]["step_num"]) for event in merged if event["name"] == "train"]
    assert [step for _, step in steps] == ["2", "2"] and steps[0][0] != steps[1][0]
    assert sum(event["name"] == "process_name" for event in merged) == 2


def test_a_folder_without_processes_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected traces of several processes"):
        inspect.merge_traces(tmp_path)
