"""`zoo export`: a checkpoint as programs, and one line for what it refuses."""

import json
import subprocess
import sys

import jax.numpy as jnp
import pytest

import zoo
from tests.processes import make_environment
from tests.tools.export.serve_cases import import_serve


def test_export_writes_a_folder_that_serves(run, bytes_model, tmp_path):
    """The command that is printed gives the tokens of `zoo.generate`."""
    sizes = ("--seq-len", 4, "--length", 12, "--batch", 2, "--platforms", "cpu", "cuda", "tpu")
    out, _ = run("export", bytes_model, tmp_path / "out", *sizes)
    assert "decode.jax_export" in out
    assert f'runs on   cpu, cuda, tpu: python {tmp_path / "out" / "serve.py"} "1 2 3" --new 8' in out
    about = json.loads((tmp_path / "out" / "export.json").read_text())
    assert (about["platforms"], about["batch"]) == (["cpu", "cuda", "tpu"], 2)
    command = [sys.executable, tmp_path / "out" / "serve.py", "1 2 3 4 5 6", "7", "--new", "3"]
    done = subprocess.run(command, env=make_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    new = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    tokens = jnp.array([[1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 7]])
    mask = jnp.arange(6) >= jnp.array([[0], [5]])
    assert new == zoo.generate(zoo.load(bytes_model), tokens, mask=mask, max_new_tokens=3, length=12).tolist()


def test_serve_refuses_what_the_programs_do_not_take(run, bytes_model, tmp_path, monkeypatch):
    run("export", bytes_model, tmp_path, "--seq-len", 2, "--length", 8, "--batch", 2, "--overwrite")
    serve = import_serve(tmp_path)
    for words, message in (
        (["1", "2", "3"], "the programs take 2 rows, and 3 were given"),
        (["1", ""], "a row is one or more token ids from 0 to 255"),
        (["1", "256"], "a row is one or more token ids from 0 to 255"),
        (["1 2", "3", "--new", "7"], "2 tokens and 7 new ones do not fit into caches for 8"),
    ):
        monkeypatch.setattr(sys, "argv", ["serve.py", *words])
        with pytest.raises(SystemExit, match=message):
            serve.main()


def test_export_refuses_in_one_line(refused, bytes_model, gpt2, tmp_path):
    (tmp_path / "notes").write_text("mine")
    assert "--overwrite" in refused("export", bytes_model, tmp_path)
    assert "batch is a whole number, at least 1, not 0" in refused(
        "export", bytes_model, tmp_path / "out", "--batch", 0
    )
    assert "model learned 64 positions" in refused("export", gpt2, tmp_path / "out", "--length", 65)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes"]
