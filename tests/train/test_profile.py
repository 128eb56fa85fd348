"""Profiler traces of a few steps: their files, and the message without one."""

import gzip
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo import train

BATCHES = np.zeros(200, np.uint8)


def toy(out, steps, *, resume=False, fail_at=0, stop_at=0):
    """Steps of a product in a loop; at `fail_at` the loop breaks with an error, at `stop_at` a signal has come."""
    batches = train.ShuffledBatches(train.TokenWindows(BATCHES, 2), 1)

    @jax.jit
    def profiled_step(weight):
        with jax.named_scope("Model"):
            return jax.lax.scan(lambda x, _: (jax.named_scope("layer")(jnp.tanh)(x @ x), None), weight, length=3)[0]

    weight = jnp.full((8, 8), 0.1)
    with train.Run(train.RunOptions(out, profile=True, resume=resume), config={"profile": True, "a": 1}) as run:
        weight = run.restore(weight, batches)
        for _ in run.steps(batches, steps):
            weight = profiled_step(weight)
            if run.step == fail_at:
                raise RuntimeError("a step failed")
            run._interrupt.requested = run.step == stop_at
        run.save(weight, batches)
    return run


def events(out, process=""):
    (path,) = (out / "profile" / process).glob("plugins/profile/*/perfetto_trace.json.gz")
    assert list(path.parent.glob("*.xplane.pb"))
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def steps_in(found):
    return [int(event["args"]["step_num"]) for event in found if event.get("name") == "train"]


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    out = tmp_path_factory.mktemp("traced") / "run"
    toy(out, 12)
    return out


def test_profile_has_steps_and_scopes(traced):
    assert steps_in(events(traced)) == [3, 4, 5, 6, 7]
    (path,) = (traced / "profile").glob("plugins/profile/*/*.xplane.pb")
    assert b"jit(profiled_step)/Model/" in path.read_bytes(), "XProf shows the scopes of operations"
    assert json.loads((traced / "config.json").read_text()) == {"a": 1}


@pytest.mark.slow  # the first steps of a process are counted above
def test_profile_counts_steps_of_this_process_after_resume(traced, tmp_path, capsys):
    out = shutil.copytree(traced, tmp_path / "run")
    toy(out, 16, resume=True)
    said = capsys.readouterr().out
    assert f"a trace of steps 15 to 16 is in {out / 'profile'}: open " in said
    assert "perfetto_trace.json.gz at ui.perfetto.dev, or the folder with `xprof" in said


def test_profile_of_too_few_steps_says_so(tmp_path, capsys):
    toy(tmp_path, 2)
    said = capsys.readouterr().out
    assert said.count("no trace: 2 steps were run, and the first 2 are skipped: they compile") == 1
    assert not (tmp_path / "profile").exists()


def test_profile_stops_on_error(tmp_path, capsys):
    with pytest.raises(RuntimeError, match="a step failed"):
        toy(tmp_path, 12, fail_at=4)
    assert "a trace of steps 3 to 4 is in" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="No profile started"):
        jax.profiler.stop_trace()


@pytest.mark.slow  # test_profile_stops_on_error ends a trace early by default, and test_run stops by a signal
def test_profile_stops_on_signal(tmp_path, capsys):
    run = toy(tmp_path, 12, stop_at=3)
    assert run.stopped and steps_in(events(tmp_path)) == [3, 4]
    assert "stopped by a signal after step 4 of 12" in capsys.readouterr().out


def test_profile_has_one_folder_per_process(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with train.Profile(tmp_path / "profile", print) as profile:
        for number in range(4):
            with profile.step(number):
                jax.block_until_ready(jnp.ones(3) + number)
    assert steps_in(events(tmp_path, "process_1")) == [2, 3]
