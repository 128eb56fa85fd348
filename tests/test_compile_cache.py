"""Persistent compilation cache: on for recipes and commands, off by request, bounded, and harmless when it fails."""

import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from zoo import cli, train
from zoo._compile_cache import enable_compile_cache
from zoo.inspect import compiled

SETTINGS = {
    "jax_compilation_cache_dir": None,
    "jax_compilation_cache_max_size": -1,
    "jax_compilation_cache_include_metadata_in_key": False,
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 1.0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The folder that a user's processes would take; JAX is set as in a new process, and as before afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ZOO_COMPILE_CACHE")
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    try:
        with warnings.catch_warnings():
            for name, value in SETTINGS.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            yield tmp_path / "cache" / "equizoo" / "compiled"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def is_on() -> bool:
    return jax.config.jax_compilation_cache_dir is not None


def compile_squares(seed=0):
    """Compile a function of its own and return its result, and True if the program was read from the cache."""

    def squares(x):
        return jnp.sum(jnp.tanh(x @ x.T), axis=0)

    x = jax.random.normal(jax.random.key(seed), (7, 5))
    step = jax.jit(squares)
    is_cached = compiled(step, x).seconds.cached
    return np.asarray(step(x)), is_cached


def recipe(*, run_options: train.RunOptions = train.RunOptions(Path("runs/a"))):
    return jax.config.jax_compilation_cache_dir


def test_recipes_cache_compiled_programs_by_default(folder, tmp_path, capsys):
    words = ["--out", str(tmp_path / "run")]
    assert train.run_cli(recipe, arguments=[*words, "--no-compile-cache"]) is None and not folder.exists()
    assert train.run_cli(recipe, arguments=words) == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IRWXU
    fresh, is_cached = compile_squares()
    assert not is_cached and any(folder.glob("jit_squares-*"))
    again, is_cached = compile_squares()
    assert is_cached and again.tobytes() == fresh.tobytes()


@pytest.mark.parametrize("command", ["generate", "evaluate", "parity"])
def test_commands_that_compile_turn_it_on(folder, tmp_path, capsys, command):
    words = [command, str(tmp_path / "nowhere"), *(["--data", "x"] if command == "evaluate" else [])]
    words += ["--tokens", "1"] if command == "generate" else []
    for more, expected in ((["--no-compile-cache"], False), ([], True)):
        with pytest.raises(SystemExit, match="2"):
            cli.main([*words, *more])
        assert is_on() is expected
    assert capsys.readouterr().err.count("there is no directory") == 2


@pytest.mark.parametrize("choice", ["off", "OFF", "0"])
def test_environment_turns_it_off(folder, monkeypatch, choice):
    monkeypatch.setenv("ZOO_COMPILE_CACHE", choice)
    enable_compile_cache()
    assert not is_on() and not folder.exists()


def test_environment_moves_it(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ZOO_COMPILE_CACHE", str(tmp_path / "elsewhere"))
    enable_compile_cache(exact_names=True)
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "elsewhere") and not folder.exists()
    assert jax.config.jax_compilation_cache_include_metadata_in_key


def test_settings_of_jax_are_left_alone(folder, tmp_path, monkeypatch):
    for name, value in (
        ("jax_enable_compilation_cache", False),
        ("jax_compilation_cache_max_size", 0),
        ("jax_compilation_cache_dir", str(tmp_path / "own")),
    ):
        jax.config.update(name, value)
        enable_compile_cache()
        assert getattr(jax.config, name) == value and jax.config.jax_persistent_cache_min_compile_time_secs == 1
        jax.config.update(name, SETTINGS[name])
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")
    enable_compile_cache()
    assert is_on() and jax.config.jax_persistent_cache_min_compile_time_secs == 1


def test_old_entries_are_evicted(folder, monkeypatch):
    folder.mkdir(mode=0o700, parents=True)
    for age, (name, size) in enumerate({"a": 60, "b": 30, "c": 30, "d": 1}.items()):
        (folder / f"{name}-cache").write_bytes(bytes(size))
        os.utime(folder / f"{name}-cache", (1e9 - age, 1e9 - age))
    (folder / "other").write_bytes(bytes(1000))
    os.utime(folder / "c-cache", (2e9, 1e9))  # written long ago, and read since
    jax.config.update("jax_compilation_cache_max_size", 100)
    enable_compile_cache()
    assert sorted(path.name for path in folder.iterdir()) == ["a-cache", "c-cache", "other"]
    monkeypatch.setattr("zoo._compile_cache._MOST_ENTRIES", 1)
    jax.config.update("jax_compilation_cache_dir", None)
    enable_compile_cache()
    assert sorted(path.name for path in folder.iterdir()) == ["c-cache", "other"]


def test_unsafe_folders_are_refused_in_a_line(folder, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    cases = {"file/a": "file", "open": f"others may write {tmp_path / 'open'}; chmod go-w", "theirs": "another user"}
    for name, reason in cases.items():
        caplog.clear()
        monkeypatch.setenv("ZOO_COMPILE_CACHE", str(tmp_path / name))
        if name == "theirs":
            monkeypatch.setattr(os, "getuid", lambda: 12345)
        enable_compile_cache()
        (record,) = caplog.records
        assert not is_on() and reason in record.message and "\n" not in record.message
        assert record.message.startswith("compiled programs are not cached (") and record.levelno == logging.WARNING


def test_damaged_entries_are_compiled_again(folder, caplog):
    enable_compile_cache()
    fresh, _ = compile_squares()
    for path in folder.glob("*-cache"):
        path.write_bytes(path.read_bytes()[:-20])
    again, is_cached = compile_squares()
    assert not is_cached and again.tobytes() == fresh.tobytes()
    (record,) = caplog.records
    assert "cannot be read" in record.message and str(folder) in record.message and "\n" not in record.message
    assert compile_squares()[1] and len(caplog.records) == 1


def test_full_disk_does_not_end_a_run(folder, caplog):
    enable_compile_cache()
    compile_squares()  # JAX opens the folder when it compiles first
    shutil.rmtree(folder)
    folder.touch()  # no file can be made in it
    result, is_cached = compile_squares()
    assert result.shape == (7,) and not is_cached
    (record,) = caplog.records
    assert "cannot be written" in record.message and "\n" not in record.message


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag names instruction sets of x86")
def test_keys_depend_on_the_processors_instruction_sets():
    """JAX puts this fingerprint into every key: a home may be shared by machines of several kinds."""
    probe = "import jax; from jax._src.lib import xla_client as client; print(client.get_topology_for_devices("
    probe += "jax.devices()).fingerprint())"
    prints = []
    for flags in ("", "", "--xla_cpu_max_isa=SSE4_2"):
        environment = os.environ | {"XLA_FLAGS": flags}
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, env=environment)
        prints.append(done.stdout)
    assert prints[0] == prints[1] != prints[2] != ""
