"""Metrics: fetched without blocking, written as valid JSON, truncated to the step of a resume."""

import errno
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo.train import Metrics, read_metrics
from zoo.train.metrics import truncate_after
from zoo.train.trackers import Tracker


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_fetch_every_few_steps_except_the_newest(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path, fetch_every=4) as metrics, jax.transfer_guard("disallow"):
        fetched = [len(metrics.log(step, loss=jax.device_put(np.float32(step)))) for step in range(1, 11)]
        assert fetched == [0, 0, 0, 0, 4, 0, 0, 0, 4, 0]
        assert [line["step"] for line in lines_of(path)] == list(range(1, 9))
    assert lines_of(path) == [dict(step=step, loss=float(step)) for step in range(1, 11)]


def test_metrics_merge_logs_of_one_step(tmp_path):
    with Metrics(tmp_path / "m", fetch_every=2) as metrics:
        metrics.log(1, loss=jnp.float32(0.1), note=np.arange(2))
        metrics.log(1, validation=3.0)
        metrics.flush()
        metrics.log(1, late=1)
    assert (tmp_path / "m").read_text() == (
        '{"step": 1, "loss": 0.10000000149011612, "note": [0, 1], "validation": 3.0}\n{"step": 1, "late": 1}\n'
    )
    assert read_metrics(tmp_path / "m") == [dict(step=1, loss=0.10000000149011612, note=[0, 1], validation=3.0, late=1)]


def test_metrics_write_nan_and_infinity_as_strings(tmp_path):
    with Metrics(tmp_path / "m") as metrics:
        metrics.log(1, a=jnp.nan, b=jnp.array([jnp.inf, -jnp.inf, 1]), c=jnp.bfloat16(2))
    line = json.loads((tmp_path / "m").read_text(), parse_constant=pytest.fail)
    assert line == dict(step=1, a="nan", b=["inf", "-inf", 1.0], c=2.0)


@pytest.mark.parametrize("torn", ["", '{"step": 6, "lo'])
def test_truncate_after(tmp_path, torn):
    path = tmp_path / "m"
    truncate_after(path, 3)
    assert not path.exists() and read_metrics(path) == []
    whole = "".join(json.dumps(dict(step=step, loss=step / 3)) + "\n" for step in range(1, 6))
    path.write_text(whole + torn)
    truncate_after(path, 3)
    assert path.read_text() == "".join(line + "\n" for line in whole.splitlines()[:3])
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
    assert list(tmp_path.iterdir()) == [path]


def test_read_metrics_names_an_invalid_line(tmp_path):
    (tmp_path / "m").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"m, line 2: not JSON"):
        read_metrics(tmp_path / "m")


class Memory:
    def __init__(self):
        self.seen, self.closed = [], False

    def log(self, step, values):
        self.seen.append((step, dict(values)))

    def close(self):
        self.closed = True


def test_trackers_receive_written_metrics(tmp_path):
    memory = Memory()
    assert isinstance(memory, Tracker)
    with Metrics(tmp_path / "m", fetch_every=1, trackers=[memory]) as metrics:
        metrics.log(1, loss=jnp.float32(2))
        metrics.log(2, loss=jnp.nan)
        assert memory.seen == [(1, dict(loss=2.0))] and not memory.closed
    assert memory.seen[1:] == [(2, dict(loss="nan"))] and memory.closed


def test_read_metrics_names_damaged_lines(tmp_path):
    for line in (b"\xff\xfe", b"\0\0", b"[1]", b'{"loss": 1}', b'{"step": "1"}', b"[" * 9999):
        (tmp_path / "m").write_bytes(b'{"step": 1}\n' + line + b"\n")
        with pytest.raises(ValueError, match=r"m, line 2: (not JSON|no record of a step)"):
            read_metrics(tmp_path / "m")
    (tmp_path / "m").write_bytes(b'{"step": 1}\n\0\0\0')  # the end of a file after a power cut
    assert read_metrics(tmp_path / "m") == [dict(step=1)]


class FullDisk:
    """`os.write` that writes half of what fits and then fails, as long as `full`."""

    def __init__(self, monkeypatch):
        self.full, self.write = True, os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, descriptor, content):
        if self.full and len(content) < 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.write(descriptor, content[: len(content) // 2] if self.full else content)


def test_metrics_wait_for_room_on_the_disk(tmp_path, caplog, monkeypatch):
    path = tmp_path / "m"
    with Metrics(path, fetch_every=1) as metrics:
        metrics.log(1, loss=0.5)
        metrics.flush()
        disk = FullDisk(monkeypatch)
        for step in range(2, 7):
            metrics.log(step, loss=0.5)
            metrics.flush()
        assert path.read_text() == '{"step": 1, "loss": 0.5}\n'
        assert [record.message for record in caplog.records] == [
            f"{path}: no space is left on the disk: the lines are kept in memory and tried again"
        ]
        disk.full = False
    assert [line["step"] for line in lines_of(path)] == [1, 2, 3, 4, 5, 6]


def test_metrics_lost_on_a_full_disk_are_an_error(tmp_path, monkeypatch):
    FullDisk(monkeypatch)
    metrics = Metrics(tmp_path / "m")
    metrics.log(1, loss=0.5)
    metrics.log(2, loss=0.5)
    with pytest.raises(OSError, match="m: no space is left on the disk for its last 2 lines"):
        metrics.close()
    assert (tmp_path / "m").read_bytes() == b""
