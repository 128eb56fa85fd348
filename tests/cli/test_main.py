"""The `zoo` command: help, exit status, one-line errors for bad input, tracebacks for bugs."""

import contextlib
import inspect
import os
import re
import shutil
import subprocess
import sys

import pytest

import zoo
from scripts.attack.hostile_files import EVIL, TEXTS, list_commands
from zoo import cli
from zoo._terminal import escape_controls


def test_help_has_one_line_per_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    text = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert name in text and (command.__doc__ or "").split()[0] in text
    assert "Args" not in text and "whatever the size" not in text  # of info's own help


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_command_help_describes_every_option(capsys, name):
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    out = capsys.readouterr().out
    assert "Args:" not in out and "{None}" not in out
    text = "".join(filter(str.isalnum, out))  # the help is wrapped, in boxes
    described = inspect.getdoc(cli.COMMANDS[name]).partition("Args:")[2]
    for option in cli.COMMANDS[name].__annotations__.keys() - {"return"}:
        words = re.search(rf"\n    {option}: ((?:.|\n     )+)", described)[1]
        assert text.count("".join(filter(str.isalnum, words))) == 1, option


def test_version(run, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    assert "`zoo --version` the version" in " ".join(capsys.readouterr().out.split())
    assert run("--version")[0].strip() == zoo.__version__


@pytest.mark.parametrize("words", [[], ["info"], ["informs"], ["info", "x", "--nope"]])
def test_unknown_arguments_exit_with_status_2(capsys, words):
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert "Traceback" not in capsys.readouterr().err


def test_missing_checkpoint_is_one_line(refused, tmp_path):
    assert "there is no directory" in refused("info", tmp_path / "nowhere")
    assert "hf download some/name" in refused("generate", "some/name", "--tokens", "1")
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    assert "did you mean 'llama'" in refused("convert", tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["chat", "info", "draw", "generate", "evaluate", "export", "parity", "convert", "plan"]
)
def test_a_runs_folder_is_named(refused, tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").touch()
    further = {
        "generate": ["a"],
        "evaluate": ["--data", tmp_path],
        "parity": ["--expected", tmp_path / "x.safetensors"],
        "convert": [tmp_path / "out"],
        "export": [tmp_path / "out"],
        "plan": ["--on", "h100:1x8"],
    }
    (tmp_path / "a.txt").write_text("some text")
    assert f"error: {tmp_path} is a run's folder, and has no export/" in refused(name, tmp_path, *further.get(name, ()))


def test_a_model_for_an_adapter_is_named_before_any_is_loaded(refused, bytes_model, monkeypatch):
    monkeypatch.setattr(zoo, "load", None)
    assert f"{bytes_model} is a model and not an adapter" in refused("chat", bytes_model, "--adapter", bytes_model)


def planted(error):
    def info():
        """Fail."""
        if error is KeyError:
            return {}["nothing"]
        raise error

    return {"info": info, "other": info}


def test_unexpected_errors_keep_their_traceback(monkeypatch):
    monkeypatch.setattr(cli, "COMMANDS", planted(KeyError))
    with pytest.raises(KeyError):
        cli.main(["info"])
    monkeypatch.setattr(cli, "COMMANDS", planted(ValueError("raised elsewhere")))
    with pytest.raises(ValueError, match="elsewhere"):
        cli.main(["info"])


def test_file_system_errors_are_one_line(monkeypatch, refused):
    monkeypatch.setattr(cli, "COMMANDS", planted(OSError(28, "No space left on device")))
    assert "No space left" in refused("info")


def test_interrupt_exits_with_status_130(monkeypatch, capsys):
    monkeypatch.setattr(cli, "COMMANDS", planted(KeyboardInterrupt()))
    with pytest.raises(SystemExit, match="130"):
        cli.main(["info"])
    assert capsys.readouterr().err == "zoo info: interrupted\n"


@pytest.mark.parametrize(
    ("cause", "shown"), [(AssertionError(), "no such device. GPUs"), (RuntimeError("no x"), "(no x)")]
)
def test_devices_that_do_not_start_are_one_line(monkeypatch, refused, cause, shown):
    def start():
        raise cause

    monkeypatch.setattr("jax.devices", start)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(cli, "COMMANDS", planted(type(cause)()))
    error = refused("info")
    assert "JAX_PLATFORMS=cuda: JAX finds no such device" in error and shown in error and error.count("\n") == 1


def test_other_assertions_keep_their_traceback(monkeypatch):
    monkeypatch.setattr(cli, "COMMANDS", planted(AssertionError("of our own")))
    with pytest.raises(AssertionError, match="of our own"):
        cli.main(["info"])


def test_a_broken_pipe_that_is_not_standard_output_is_an_error(monkeypatch, refused):
    monkeypatch.setattr(cli, "COMMANDS", planted(BrokenPipeError(32, "Broken pipe")))
    assert "Broken pipe" in refused("info")


@pytest.mark.one_case
@pytest.mark.parametrize("damage", TEXTS.values(), ids=TEXTS)
def test_no_command_prints_control_characters(damage, text_model, tmp_path, capsys):
    directory, text = tmp_path / "hostile", tmp_path / "text"
    shutil.copytree(text_model, directory)
    damage(directory)
    text.write_text(f"naïve {EVIL} text " * 9)
    shown = ""
    for words in list_commands(directory, text, tmp_path / "out"):
        with contextlib.suppress(SystemExit):
            cli.main(list(map(str, words)))
        shown += "".join(capsys.readouterr())
    found = {character for character in shown if escape_controls(character) != character} - {"\n", "\t"}
    assert shown and not found
    assert "\\x" in shown or "\\u202e" in shown, "nothing hostile was printed"


def process(*words):
    command = [sys.executable, "-m", "zoo.cli", *map(str, words)]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_families_has_one_line_per_family(run):
    out, error = run("families")
    assert error == ""
    assert [line.split()[0] for line in out.splitlines()] == list(zoo.families())
    assert "LlamaForCausalLM" in out and "arXiv" not in out
    assert max(map(len, out.splitlines())) < 350
    everything, _ = run("families", "-v")
    assert len(everything.splitlines()) == len(out.splitlines())
    assert "arXiv:2302.13971" in everything and "2 cases, mesh, adapters" in everything


def test_info_mesh_needs_no_devices(bytes_model):
    done = process("info", bytes_model, "--fsdp", 2, "--tensor", 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert "P('tensor', 'fsdp')" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["-m", "zoo.cli", "families"], ["-m", "zoo.cli", "info", "--help"], ["recipes/transformer.py", "--help"]]
)
def test_closed_pipe_prints_no_error(words):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, *words], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")
