"""A run of ten steps that is resumed from step 3 of 6, and what the packages of its trackers read of it.

    python tests/train/tracked_run.py wandb FOLDER

prints one line of JSON: how many runs there are, their group, the rate of the configuration, the loss by step, the text
of the samples, and whether there is a report.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np

from zoo import train
from zoo.tools.report import write_report

SAMPLES = [("def main(", "a,\n  b)"), ("class ", "Node:")]


class Counter:
    def __init__(self):
        self.state = 0

    def __next__(self):
        self.state += 1
        return self.state

    def restore(self, state):
        self.state = state


def write(folder: Path, name: str, steps: int, *, resume: int | bool = False) -> None:
    options = train.RunOptions(folder, resume=resume, track=(name,))
    batches = Counter()
    with train.Run(options, config={"rate": 0.5, "out": folder}, name="wide", fetch_every=2) as run:
        state = run.restore({"w": np.zeros(2)}, batches)
        for _ in run.steps(batches, steps):
            run.log(loss=steps + run.step, rows=np.arange(4).reshape(2, 2), load=np.zeros(100))
            if run.due(3):
                run.save(state, batches)
    write_report(run.directory, title="Ten steps", summary="", curves={"loss": "loss"}, unit="nats", samples=SAMPLES)


def read_tensorboard(folder: Path) -> dict:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "wide" / "tensorboard"))
    events.Reload()
    tags = events.Tags()
    assert sorted(tags["scalars"]) == ["loss", "rows/0", "rows/1", "rows/2", "rows/3"]
    texts = {tag.split("/")[0]: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in tags["tensors"]}
    return {
        "runs": 1,
        "group": folder.name,  # by the path
        "rate": float(re.findall("rate: (.*)", texts["config"])[0]),
        "loss": [[event.step, event.value] for event in events.Scalars("loss")],
        "samples": texts["samples"],
        "report": Path(texts["report"]).is_file(),
    }


def read_wandb_records(path: Path):
    """Yield the records of a run's file: LevelDB's log format, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    at = 7
    whole = b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        kind = data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield Record.FromString(whole)
            whole = b""


def read_wandb(folder: Path) -> dict:
    rows, runs, found = [], [], {"report": False}
    for path in sorted(folder.glob("wide/wandb/offline-run-*/*.wandb")):
        for record in read_wandb_records(path):
            if record.HasField("run"):
                runs.append(record.run)
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if "loss" in row:
                assert row["rows/3"] == 3 and "load/0" not in row
                rows.append(row)
            if "report/path" in row:
                table = json.loads((path.parent / "files" / row["samples/path"]).read_text())
                found["samples"] = "\n".join("".join(sample) for sample in table["data"])
                found["report"] = "Ten steps" in (path.parent / "files" / row["report/path"]).read_text()
    assert {run.display_name for run in runs} == {"wide"}
    return found | {
        "runs": len({run.run_id for run in runs}),
        "group": runs[-1].run_group,
        "rate": next(json.loads(item.value_json) for item in runs[-1].config.update if item.key == "rate"),
        "loss": sorted({row["step"]: row["loss"] for row in rows}.items()),
    }


if __name__ == "__main__":
    tracker, out = sys.argv[1], Path(sys.argv[2])
    write(out, tracker, 6)
    write(out, tracker, 10, resume=3)
    print(json.dumps(globals()[f"read_{tracker}"](out)))
