"""Damage the checkpoints of a run, and resume it: a whole state with a line, or an error, and never another state.

    python scripts/attack/damage_checkpoints.py --cases 600 --seed 0

Each case flips a bit, truncates, deletes, zeroes or extends one file, in the newest of two checkpoints, in both, or
beside them. Exits with 1 if a state was neither of the two that were saved, if the older one was restored without a
line, if a damaged run started at step 1, lost a file or ended with an error that the library does not raise itself.
"""

import argparse
import collections
import logging
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zoo.text.batches import BatchIterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

import zoo
from zoo import train

ALLOWED = ("newest restored", "older restored, with a line", "refused by name")


def flip_bit(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        bit = chance.randrange(len(content) * 8)
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(max(path.stat().st_size, 1)))


def delete(path: Path, chance: random.Random) -> None:
    path.unlink()


def zero(path: Path, chance: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def extend(path: Path, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.randrange(1, 100)))


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "a flipped bit": flip_bit,
    "truncated": truncate,
    "deleted": delete,
    "zeroed": zero,
    "extended": extend,
}


def make_state(step: int) -> dict[str, Any]:
    """Return arrays that depend on the step in every entry."""
    key = jax.random.fold_in(jax.random.key(0), step)
    return {"weight": jax.random.normal(key, (40, 30)), "half": jnp.full(7, step, jnp.bfloat16), "key": key}


def make_batches() -> BatchIterator:
    return train.ShuffledBatches(train.TokenWindows(np.arange(500) % 7, 4), 2)


def make_run(out: Path) -> None:
    """Train for six steps that save their state in steps 4 and 6."""
    batches = make_batches()
    with train.Run(out, config={"rate": 0.1}) as run:
        for _ in run.steps(batches, 6):
            run.log(loss=1 / run.step)
            if run.step in (4, 6):
                run.save(make_state(run.step), batches)


def resume(out: Path, lines: list[str]) -> str:
    """Resume the run in `out` and return the outcome in words."""
    batches, like = make_batches(), jax.tree.map(jnp.zeros_like, make_state(0))
    lines.clear()
    try:
        with train.Run(train.RunOptions(out, resume=True), config={"rate": 0.1}) as run:
            state = run.restore(like, batches)
            step = run.step
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = Path(last.filename).is_relative_to(Path(zoo.__file__).parent) and (last.line or "").startswith("raise")
        return "refused by name" if ours else f"raw traceback: {type(error).__name__} at {last.filename}:{last.lineno}"
    if step == 0:
        return "started at step 1"
    fresh = make_batches()
    for _ in range(step):
        next(fresh)
    equal = jax.tree.map(lambda x, y: bool((x == y).all()) and x.dtype == y.dtype, state, make_state(step))
    if step not in (4, 6) or not all(jax.tree.leaves(equal)) or batches.state != fresh.state:
        return "another state"
    if step == 6:
        return "newest restored"
    return "older restored, with a line" if any("6: passed over" in line for line in lines) else "older, without a line"


def list_files(out: Path) -> set[str]:
    return {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}


def attack(pristine: Path, out: Path, where: str, damage: str, chance: random.Random, lines: list[str]) -> str:
    """Copy the run, damage one file in each of the folders that `where` names, and resume."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(pristine, out)
    folders = {"newest": ["checkpoints/6"], "both": ["checkpoints/6", "checkpoints/4"], "beside": [""]}[where]
    for folder in folders:
        found = (out / folder).rglob("*") if folder else out.iterdir()
        DAMAGES[damage](chance.choice(sorted(path for path in found if path.is_file())), chance)
    before = list_files(out)
    outcome = resume(out, lines)
    lost = {name for name in before - list_files(out) if not name.endswith(".part")}
    return f"lost {sorted(lost)[0]}" if lost else outcome


class Lines(logging.Handler):
    """Collect the messages of the library."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> int:
    """Print a table of outcomes, and return 1 if one of them is forbidden."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=600, help="number of damaged runs (default: 600)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of files and bytes (default: 0)")
    flags = parser.parse_args()
    chance, heard, outcomes = random.Random(flags.seed), Lines(), collections.Counter[tuple[str, str, str]]()
    logging.getLogger("zoo").addHandler(heard)
    logging.getLogger("zoo").propagate = False
    with tempfile.TemporaryDirectory() as folder:
        pristine = Path(folder) / "pristine"
        make_run(pristine)
        for case in range(flags.cases):
            where = ("newest", "newest", "both", "beside")[case % 4]
            damage = chance.choice(list(DAMAGES))
            outcomes[where, damage, attack(pristine, Path(folder) / "run", where, damage, chance, heard.lines)] += 1
    for (where, damage, outcome), count in sorted(outcomes.items()):
        print(f"{count:6}  {where:8}{damage:16}{outcome}")
    totals = collections.Counter[str]()
    for (_, _, outcome), count in outcomes.items():
        totals[outcome] += count
    forbidden = {outcome: count for outcome, count in totals.items() if outcome not in ALLOWED}
    print(f"{flags.cases} cases: " + ", ".join(f"{count} {outcome}" for outcome, count in totals.most_common()))
    print(f"forbidden: {sum(forbidden.values())}")
    return 1 if forbidden else 0


if __name__ == "__main__":
    sys.exit(main())
