"""A recipe on two processes, with checkpoints at a URL: SIGTERM to one saves on both; one process, that of the tests,
goes on from it on another mesh, and two on a third."""

import json
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from recipes import transformer
from tests.processes import ROOT, make_environment
from tests.recipes.flags import call

SIZES = {"embed": 16, "mlp_dim": 16, "layers": 1, "seq_len": 16, "batch_size": 8, "eval_every": 100}
# The model stays what it was, whatever the number of steps: the loss of a step tells its rows, and the parameters.
STILL = {"learning_rate": 0.0}


def start(index, port, out, *words, devices=2):
    """Start process `index` of two, each with so many devices."""
    place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(index)}
    environment = make_environment(devices)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (SIZES | STILL).items()]
    command = [sys.executable, "recipes/transformer.py", *flags, "--data=zoo/train", f"--out={out}", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment | place, **pipes)


def find_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def read_metrics(out):
    """Return the training loss by step."""
    path, losses = out / "metrics.jsonl", {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        row = json.loads(line) if line.endswith("}") else {}  # the last line may be on its way
        if "bits_per_byte" in row:
            losses[row["step"]] = row["bits_per_byte"]
    return losses


def finish(*processes):
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=240)[0])
    finally:
        for process in processes:
            process.kill()
    return outputs, [process.returncode for process in processes]


@pytest.mark.ci
def test_run_moves_between_processes_and_meshes(tmp_path, capfd, monkeypatch):
    out, bucket, port = tmp_path / "moved", tmp_path / "bucket", find_port()
    url = ("--checkpoint-url", f"file://{bucket}")
    both = [start(index, port, out, "--fsdp", "4", "--steps", "100000", *url) for index in range(2)]
    give_up = time.monotonic() + 90
    while len(read_metrics(out)) < 2 and time.monotonic() < give_up and all(x.poll() is None for x in both):
        time.sleep(0.2)
    both[1].send_signal(signal.SIGTERM)
    outputs, statuses = finish(*both)
    assert statuses == [143, 143], "\n".join(outputs)
    saved = max(int(path.name) for path in bucket.iterdir() if path.name.isdecimal())
    assert "parameters on fsdp 4" in outputs[0], outputs
    assert "parameters on" not in outputs[1], outputs  # the first alone prints

    monkeypatch.setattr(transformer, "PROMPTS", [])  # the second pair samples
    alone = {"data": (ROOT / "zoo/train",)} | SIZES | STILL
    call(transformer.main, out=out, resume=True, steps=saved + 20, checkpoint_url=f"file://{bucket}", **alone)
    assert "parameters on data 8" in capfd.readouterr().out

    port = find_port()
    words = ("--resume", "--fsdp", "2", "--steps", str(saved + 40), *url)
    outputs, statuses = finish(*(start(index, port, out, *words, devices=1) for index in range(2)))
    assert statuses == [0, 0], "\n".join(outputs)
    call(transformer.main, out=tmp_path / "whole", steps=saved + 40, **alone)
    losses, expected = read_metrics(out), read_metrics(tmp_path / "whole")
    assert max(losses) == max(expected) == saved + 40
    assert len({round(loss, 3) for loss in expected.values()}) > 20  # one step's rows are told from another's
    same = sorted(losses.keys() & expected.keys())
    assert len(same) > 0.8 * (saved + 40)
    np.testing.assert_allclose([losses[x] for x in same], [expected[x] for x in same], rtol=1e-5)
