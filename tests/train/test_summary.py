"""The last metrics of a run, and its speed."""

import json

from zoo import train


def write_run(directory, validation, speeds):
    directory.mkdir(parents=True)
    metrics = [{"step": 1, "validation": 9.0}, {"step": 3, "validation": 8.0}]
    metrics.append({"step": 5, "validation": validation, "loss": 1.5})
    timing = [{"step": 1, "seconds": 1.0}, *({"step": 2, "seconds": 2.0, "steps_per_second": x} for x in speeds)]
    for name, lines in (("metrics", metrics), ("timing", timing)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_summary_has_the_last_metrics_and_the_speed(tmp_path):
    write_run(tmp_path / "a", 2.5, [4.0])
    last = train.summary(tmp_path / "a")
    assert (last["validation"], last["loss"], last["milliseconds_per_step"]) == (2.5, 1.5, 250)
    write_run(tmp_path / "short", 2.5, [])
    assert train.summary(tmp_path / "short")["milliseconds_per_step"] == 0
