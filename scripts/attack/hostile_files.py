"""Attack what reads and writes files: links, pipes, devices, names that control a terminal.

    python scripts/attack/hostile_files.py               # a minute or two

Each attack has a folder and a process of its own. It is refused by a message that names the file, or comes to nothing.
Exits 1 if a link was followed, a control character printed, or anything hung.
"""

import argparse
import collections
import contextlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.attack.mutations import CONFIG, INDEX, SPECIAL, WHOLE, build_tensors, parse_tensors
from scripts.attack.watched import HANG, LARGE, RAW, Watched, print_table

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests" / "fixtures" / "models" / "llama"
ADAPTER = ROOT / "tests" / "fixtures" / "adapters"
REFUSED, NOTHING, DONE = "refused by name", "no effect", "succeeded"
OUTCOMES = (REFUSED, NOTHING, DONE, RAW, HANG, LARGE)
EVIL = "x\x1b[2J\x07\r\n\u202egpj\u2066\x9b31m\u200b"


def run_command(*words: Any) -> tuple[int, str]:
    """Run `zoo` in this process; return its exit status, and all that it printed. Unexpected errors are raised."""
    from zoo.cli import main

    out, status = io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(list(map(str, words)))
        except SystemExit as stopped:
            status = int(stopped.code or 0)
    return status, out.getvalue()


def copy_model(folder: Path) -> Path:
    """Copy a small checkpoint without stored results."""
    directory = folder / "model"
    directory.mkdir()
    for name in (CONFIG, WHOLE):
        shutil.copy(MODEL / name, directory)
    return directory


# Links in the way of a file that is written, and links in a checkpoint that is copied (victim.txt is not ours).


def _plant_links(directory: Path, victim: Path, *names: str) -> None:
    directory.mkdir(exist_ok=True)
    for name in names:
        for link in (name, f"{name}.partial", f"{name}.part", f"{name}.{os.getpid()}.part", f"{name}.tmp"):
            (directory / link).symlink_to(victim)


def save_over_links(folder: Path, victim: Path) -> None:
    import zoo

    names = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    _plant_links(folder / "out", victim, CONFIG, WHOLE, INDEX, *names)
    model = zoo.load(MODEL)
    zoo.save(model, folder / "out")
    zoo.save(model, folder / "out", shard_bytes=12_000)


def save_adapter_over_links(folder: Path, victim: Path) -> None:
    import jax

    import zoo

    _plant_links(folder / "out", victim, "adapter_config.json", "adapter_model.safetensors")
    model = zoo.adapters.lora(zoo.load(MODEL), rank=2, key=jax.random.key(0))
    zoo.adapters.save(model, folder / "out")


def write_run_over_links(folder: Path, victim: Path) -> None:
    from zoo._files import write_json, write_text
    from zoo.train.metrics import append_records

    _plant_links(folder / "run", victim, "report.html", "env.json", "metrics.jsonl")
    write_text(folder / "run" / "report.html", "<html>")
    write_json(folder / "run" / "env.json", {})
    with contextlib.suppress(OSError):  # a link is refused, since a log is appended to
        append_records(folder / "run" / "metrics.jsonl", [{"step": 1}])


def convert_over_links(folder: Path, victim: Path) -> None:
    source = copy_model(folder)
    (source / "README.md").write_text("about")
    _plant_links(folder / "out", victim, CONFIG, WHOLE, "README.md")
    assert run_command("convert", source, folder / "out", "--overwrite")[0] == 0


def fork_over_links(folder: Path, victim: Path) -> None:
    _plant_links(folder / "out", victim, "mine.py")
    assert run_command("fork", "transformer", folder / "out" / "mine.py")[0] == 2
    assert run_command("fork", "transformer", folder / "out" / "mine.py", "--force")[0] == 0


def convert_links_to_outside(folder: Path, victim: Path) -> None:
    source = copy_model(folder)
    for name, target in {"README.md": victim, "vocab.txt": "../victim.txt", "tokenizer": "/proc/self/environ"}.items():
        (source / name).symlink_to(target)
    status, printed = run_command("convert", source, folder / "out")
    assert status == 0 and printed.count("link that leaves the directory") == 3, printed
    names = {path.name for path in (folder / "out").iterdir()}
    assert names == {CONFIG, WHOLE, "README.md"}, f"copied {names}"
    assert "equizoo" in (folder / "out" / "README.md").read_text()  # a model card, and not the victim


LINKS: dict[str, Callable[[Path, Path], None]] = {
    function.__name__.replace("_", " "): function
    for function in (
        save_over_links,
        save_adapter_over_links,
        write_run_over_links,
        convert_over_links,
        fork_over_links,
        convert_links_to_outside,
    )
}


def attack_with_links(folder: Path, name: str) -> tuple[str, str]:
    """Write or copy where links point to a file of somebody else."""
    victim = folder / "victim.txt"
    victim.write_text("precious")
    LINKS[name](folder, victim)
    return (NOTHING, "") if victim.read_text() == "precious" else (DONE, victim.read_text()[:100])


# Names and texts that control a terminal.


def _set_config(directory: Path, **values: Any) -> None:
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(config | values))


def _rename_tensor(directory: Path) -> None:
    header, data = parse_tensors((directory / WHOLE).read_bytes())
    header[EVIL] = header.pop("model.norm.weight")
    (directory / WHOLE).write_bytes(build_tensors(header, data))


def _name_shard(directory: Path) -> None:
    (directory / WHOLE).unlink()
    (directory / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": f"{EVIL}.safetensors"}}))


def _leave_pickles(directory: Path) -> None:
    (directory / WHOLE).unlink()
    (directory / f"{EVIL}.bin").touch()


def _add_files(directory: Path) -> None:
    for name in (f"tokenizer{EVIL}", EVIL, f"{EVIL}.pkl"):
        (directory / name).write_text(EVIL)


TEXTS: dict[str, Callable[[Path], Any]] = {
    "file names": _add_files,
    "tensor name": _rename_tensor,
    "shard name": _name_shard,
    "pickled file": _leave_pickles,
    "model_type": lambda directory: _set_config(directory, model_type=EVIL),
    "config key": lambda directory: _set_config(directory, **{EVIL: 1}),
    "config value": lambda directory: _set_config(directory, hidden_act=EVIL),
    "nested config key": lambda directory: _set_config(directory, rope_scaling={EVIL: 1}),
    "eos_token_id": lambda directory: (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": EVIL})
    ),
    "generated tokens": lambda directory: None,  # tokens of a random model are control characters, too
}


def list_commands(directory: Path, text: Path, out: Path) -> Iterator[tuple[Any, ...]]:
    """Yield the words of every command of `zoo` that reads a checkpoint."""
    yield ("families",)
    yield "info", directory, "--names"
    yield "convert", directory, out
    yield "evaluate", directory, "--data", text, "--length", 16
    yield "generate", directory, "a", "b", "--max-new-tokens", 32, "--temperature", 9
    yield "parity", directory, "--expected", directory / WHOLE


def attack_a_terminal(folder: Path, name: str) -> tuple[str, str]:
    """Run every command on a checkpoint whose names and texts hold control characters."""
    from zoo._terminal import escape_controls

    directory, text = folder / "bytes", folder / "text"
    _save_bytes_model(directory)
    TEXTS[name](directory)
    text.write_text(f"naïve {EVIL} text " * 9)
    printed = ""
    for words in list_commands(directory, text, folder / "out"):
        printed += run_command(*words)[1]
    found = {character for character in printed if escape_controls(character) != character} - {"\n", "\t"}
    return (DONE, f"printed {sorted(found)}") if found else (NOTHING, "")


def _save_bytes_model(directory: Path) -> None:
    """Save a random model of 256 tokens, bytes."""
    import jax

    import zoo

    model = zoo.models.Transformer(vocab=256, embed=8, layers=1, heads=2, mlp=8, key=jax.random.key(0))
    zoo.save(model, directory)


# Files that never end, or that wait for a writer.

FILES = (CONFIG, WHOLE, INDEX, "generation_config.json", "tokenizer.json", "adapter_config.json")


def attack_with_special_files(folder: Path, name: str) -> tuple[str, str]:
    """Load a checkpoint or an adapter one of whose files is none."""
    import zoo

    file, kind = name.split(": ")
    special = next(special for special in SPECIAL if special.name == kind)
    directory = folder / "model"
    _save_bytes_model(directory)
    if file == INDEX:
        (directory / WHOLE).unlink()
    (directory / file).unlink(missing_ok=True)
    special.make(directory / file)
    if file == "adapter_config.json":
        try:
            zoo.adapters.load(zoo.load(MODEL), directory)
        except zoo.CheckpointError as error:
            return (REFUSED if file in str(error) else RAW), str(error)
        return DONE, "it was loaded"
    status, printed = run_command("generate", directory, "a", "--max-new-tokens", 2)
    if status == 0 and kind.startswith("link to"):
        return NOTHING, ""  # as if there were no such file, which is optional
    return (REFUSED, "") if status == 2 and str(directory) in printed else (DONE, f"status {status}: {printed[:300]}")


ATTACKS: dict[str, tuple[Callable[[Path, str], tuple[str, str]], tuple[str, ...]]] = {
    "links": (attack_with_links, tuple(LINKS)),
    "terminal": (attack_a_terminal, tuple(TEXTS)),
    "special files": (
        attack_with_special_files,
        tuple(f"{file}: {special.name}" for file in FILES for special in SPECIAL),
    ),
}


def run_attack(case: tuple[str, str, Path]) -> tuple[str, str]:
    """Run one attack in its folder."""
    kind, name, folder = case
    folder.mkdir()
    return ATTACKS[kind][0](folder, name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", type=int, default=9, help="details to print of each forbidden outcome")
    options = parser.parse_args()
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    forbidden: dict[str, list[str]] = {outcome: [] for outcome in OUTCOMES[2:]}
    with tempfile.TemporaryDirectory() as folder:
        first = "special files", f"{WHOLE}: directory", Path(folder) / "first"
        watched = Watched(run_attack, first, seconds=60)
        for kind, (_, names) in ATTACKS.items():
            for number, name in enumerate(names):
                outcome, detail = watched.run((kind, name, Path(folder) / f"{kind} {number}"))
                counts[kind][outcome] += 1
                if outcome in forbidden:
                    forbidden[outcome].append(f"{kind}, {name}\n{detail}")
        watched.close()
    return print_table(counts, OUTCOMES, forbidden, options.show)


if __name__ == "__main__":
    raise SystemExit(main())
