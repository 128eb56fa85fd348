"""Persistent compilation cache: on for recipes and commands, off by request and on meshes of CPU devices, bounded."""

import logging
import os
import platform
import stat
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import zoo
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


@dataclass(frozen=True)
class Config:
    run: train.RunOptions = train.RunOptions(Path("runs/a"))


def recipe(config: Config):
    return jax.config.jax_compilation_cache_dir


def test_recipes_cache_compiled_programs_by_default(folder, tmp_path, capsys):
    words = ["--out", str(tmp_path / "run")]
    assert train.run_cli(recipe, Config, arguments=[*words, "--no-compile-cache"]) is None and not folder.exists()
    assert train.run_cli(recipe, Config, arguments=words) == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IRWXU
    fresh, is_cached = compile_squares()
    assert not is_cached and any(folder.glob("jit_squares-*"))
    again, is_cached = compile_squares()
    assert is_cached and again.tobytes() == fresh.tobytes()


@pytest.mark.parametrize("command", ["generate", "evaluate", "parity"])
def test_commands_that_compile_turn_it_on(folder, tmp_path, capsys, command):
    words = [command, str(tmp_path / "nowhere"), *(["--data", __file__] if command == "evaluate" else [])]
    words += ["--tokens", "1"] if command == "generate" else []
    for more, expected in ((["--no-compile-cache"], False), ([], True)):
        with pytest.raises(SystemExit, match="2"):
            cli.main([*words, *more])
        assert is_on() is expected
    assert capsys.readouterr().err.count("there is no directory") == 2


def test_settings_of_jax_are_left_alone(folder, tmp_path, monkeypatch):
    for name, value in (("jax_enable_compilation_cache", False), ("jax_compilation_cache_dir", str(tmp_path / "own"))):
        jax.config.update(name, value)
        enable_compile_cache()
        assert getattr(jax.config, name) == value and jax.config.jax_persistent_cache_min_compile_time_secs == 1
        jax.config.update(name, SETTINGS[name])
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "100")
    enable_compile_cache(exact_names=True)
    assert is_on() and jax.config.jax_compilation_cache_max_size == -1  # JAX has read its variables before
    assert jax.config.jax_compilation_cache_include_metadata_in_key


def test_old_programs_are_evicted(folder):
    enable_compile_cache()
    assert jax.config.jax_compilation_cache_max_size == 2**30
    compile_squares()
    (size,) = (path.stat().st_size for path in folder.glob("jit_squares-*-cache"))
    jax.config.update("jax_compilation_cache_max_size", int(1.5 * size))
    compilation_cache.reset_cache()
    jax.block_until_ready(jax.jit(lambda x: jnp.cos(x @ x.T))(jnp.ones((7, 5))))
    assert sum(path.stat().st_size for path in folder.glob("*-cache")) <= 1.5 * size


def test_folder_that_cannot_be_made_costs_one_line(folder, caplog):
    folder.parent.parent.mkdir()
    folder.parent.touch()
    enable_compile_cache()
    (record,) = caplog.records
    assert not is_on() and record.levelno == logging.WARNING
    assert record.message.startswith("compiled programs are not cached: ") and str(folder.parent) in record.message


def test_folder_that_cannot_be_written_costs_one_line(folder, caplog, monkeypatch):
    """As on a read-only file system: the user of the tests may write anywhere."""
    monkeypatch.setattr("os.access", lambda path, mode: (path, mode) != (folder, os.W_OK))
    enable_compile_cache()
    assert not is_on() and caplog.messages == [f"compiled programs are not cached: {folder} cannot be written"]


def test_user_without_a_home_costs_one_line(folder, caplog, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    enable_compile_cache()
    assert not is_on() and "there is no home to keep a cache in: set XDG_CACHE_HOME" in caplog.text


def test_mesh_of_several_cpu_devices_turns_it_off(folder, caplog):
    enable_compile_cache()
    zoo.make_mesh(devices=jax.devices()[:1])
    zoo.make_mesh(devices=jax.devices()[:1] * 8)  # stand-ins, as zoo.plan makes them
    compile_squares()
    assert compile_squares()[1] and not caplog.records
    before = sorted(folder.iterdir())
    mesh = zoo.make_mesh()
    (record,) = caplog.records
    assert record.message.startswith(f"{folder}: the compilation cache is off")
    total = zoo.spmd(lambda x: zoo.parallel.reduce(x.sum(0), over="batch"), mesh, out="embed")
    assert total(zoo.place_batch({"x": np.ones((8, 3), np.float32)}, mesh)["x"]).tolist() == [8, 8, 8]
    assert not compile_squares()[1] and sorted(folder.iterdir()) == before
    zoo.make_mesh()
    assert len(caplog.records) == 1


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
