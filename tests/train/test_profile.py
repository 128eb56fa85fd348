"""Profiler traces of a few steps: their files, and the message without one."""

import gzip
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zoo import train
from zoo.train.trace import format_scope, read_fields, read_operations, write_perfetto_trace

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
    found = events(traced)
    assert steps_in(found) == [3, 4, 5, 6, 7]
    named = [event for event in found if event.get("args", {}).get("scope", "").startswith("jit(profiled_step)/Model/")]
    assert {event["name"] for event in named} >= {"Model/layer/tanh", "Model/dot_general"}
    assert all(event["args"]["operation"] for event in named)
    assert json.loads((traced / "config.json").read_text()) == {"a": 1}


def test_trace_can_be_read_again(traced):
    before = events(traced)
    write_perfetto_trace(traced / "profile")
    assert events(traced) == before


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


READABLE = {
    "jit(step)/shard_map/jvp(Decoder)/stack/while/body/closed_call/Block/mixer.Attention/query/dot_general": (
        "Decoder/stack/Block/mixer.Attention/query/dot_general"
    ),
    "jit(step)/transpose(jvp(Decoder))/stack/while/body/checkpoint/Block/ffn.GatedMLP/up/dot_general": (
        "backward Decoder/stack/Block/ffn.GatedMLP/up/dot_general"
    ),
    "jit(step)/transpose(jvp(Decoder))/stack/while/body/checkpoint/rematted_computation/Block/norm/mul": (
        "recomputed Decoder/stack/Block/norm/mul"
    ),
    "jit(step)/jvp()/while/body/closed_call/transpose(jvp(Unembedding))/table/dot_general": (
        "backward Unembedding/table/dot_general"
    ),
    "jit(step)/mul": "mul",
    "a name of its own": "a name of its own",
}


@pytest.mark.parametrize(("scope", "wanted"), READABLE.items())
def test_format_scope_keeps_names_of_the_source(scope, wanted):
    assert format_scope(scope) == wanted


def message(*parts):
    """A protocol buffer of (field, bytes) pairs, sizes below 128."""
    return b"".join(bytes([number << 3 | 2, len(value)]) + value for number, value in parts)


def test_read_operations_of_a_profile():
    instruction = message((1, b"fusion.1"), (2, b"fusion"), (7, message((1, b"type"), (2, b"jit(f)/A/mul"))))
    bare = message((1, b"copy.2"), (2, b"copy"))
    program = message((1, b"jit_f"), (3, message((1, b"main"), (2, instruction), (2, bare))))
    stat = b"\x08\x07" + message((6, message((1, program))))  # metadata_id 7 is a number
    entry = b"\x08\x01" + message((2, message((5, stat))))
    other = message((2, b"/host:CPU"), (4, entry))
    profile = message((1, other), (1, message((2, b"/host:metadata"), (4, entry))))
    assert list(read_operations(profile, {"jit_f"})) == [("jit_f", "fusion.1", "jit(f)/A/mul")]
    assert not list(read_operations(profile, {"jit_g"}))
    assert list(read_fields(b"\x09" + bytes(8) + b"\x15" + bytes(4) + message((3, b"x")), 3)) == [b"x"]
    with pytest.raises(ValueError, match=r"not a protocol buffer: a field of kind 7 at byte 1"):
        list(read_fields(b"\x0f", 1))
