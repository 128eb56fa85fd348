"""Attack the loading of models: mutated checkpoints of every family, loaded as `zoo.load` does.

    python scripts/attack/mutate_models.py                       # 2,400 mutations, a few minutes
    python scripts/attack/mutate_models.py --cases 20000 --seed 1

The checkpoints are those of the tests. No mutation of `scripts/attack/mutations.py` may load as another model: each is
refused with one error that names its file or tensor, or loads every bit and every option of the original. Exits 1 if
any outcome is a forbidden one.
"""

import argparse
import collections
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from scripts.attack.mutations import MUTATIONS, read_files, write_files
from scripts.attack.watched import HANG, LARGE, RAW, Watched, print_table

ROOT = Path(__file__).parents[2]
REFUSED, EQUAL, WRONG, VAGUE = "refused by name", "loaded equal", "silently wrong", "vague refusal"
OUTCOMES = (REFUSED, EQUAL, WRONG, VAGUE, RAW, HANG, LARGE)
SECONDS = 20
_originals: dict[Path, Any] = {}


def load_case(case: tuple[Path, Path]) -> tuple[str, str]:
    """Load a mutated checkpoint and compare it with its original; return the outcome and a detail."""
    import jax
    import numpy as np

    import zoo
    from zoo._terminal import escape_controls
    from zoo.models.parameter_paths import find_differences

    directory, source = case
    if source not in _originals:
        _originals[source] = zoo.load(source)
    original = _originals[source]
    try:
        model = zoo.load(directory)
    except zoo.CheckpointError as error:
        message = str(error)
        names = message.count(str(directory)) and len(message) < 2000 and escape_controls(message, keep="\n") == message
        return (REFUSED if names else VAGUE), message
    if difference := next(find_differences(model, original), None):
        return WRONG, difference
    pairs = zip(jax.tree.leaves(model), jax.tree.leaves(original), strict=True)
    is_equal = all(x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
    return (EQUAL, "") if is_equal else (WRONG, "other numbers")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2400, help="number of mutations")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations")
    parser.add_argument("--show", type=int, default=3, help="details to print of each forbidden outcome")
    options = parser.parse_args()
    sources = sorted(path.parent for path in (ROOT / "tests" / "fixtures" / "models").glob("*/config.json"))
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    forbidden: dict[str, list[str]] = {outcome: [] for outcome in OUTCOMES[2:]}
    with tempfile.TemporaryDirectory() as folder:
        watched = Watched(load_case, (sources[0], sources[0]), seconds=SECONDS)
        for case in range(options.cases):
            rng = random.Random(f"{options.seed} {case}")
            source, kind = sources[case % len(sources)], rng.choice(list(MUTATIONS))
            files = read_files(source)
            what = MUTATIONS[kind](files, rng)
            directory = Path(folder) / str(case)
            write_files(directory, files)
            outcome, detail = watched.run((directory, source))
            shutil.rmtree(directory)
            counts[kind][outcome] += 1
            if outcome in forbidden:
                forbidden[outcome].append(f"case {case}, {source.name}, {what}\n{detail}")
        watched.close()
    print(f"{options.cases:,} mutations of {len(sources)} checkpoints, seed {options.seed}")
    return print_table(counts, OUTCOMES, forbidden, options.show)


if __name__ == "__main__":
    raise SystemExit(main())
