"""Attack the loading of models: mutated checkpoints of every family, loaded as `zoo.load` does.

    python scripts/attack/mutate_models.py                       # 2,400 mutations, a few minutes
    python scripts/attack/mutate_models.py --cases 20000 --seed 1

The checkpoints are those of the tests. No mutation of `scripts/attack/mutations.py` may load as another model: each is
refused with one error that names its file or tensor, or loads every bit and every option of the original. Exits 1 if
any outcome is a forbidden one.
"""

import random
from pathlib import Path
from typing import Any

from scripts.attack.mutations import MUTATIONS, read_files, write_files
from scripts.attack.watched import HANG, LARGE, RAW, attack, parse_options

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
    options = parse_options(__doc__, cases=2400)
    sources = sorted(path.parent for path in (ROOT / "tests" / "fixtures" / "models").glob("*/config.json"))

    def make_case(number: int, rng: random.Random, directory: Path) -> tuple[str, str, Path]:
        source, kind = sources[number % len(sources)], rng.choice(list(MUTATIONS))
        files = read_files(source)
        what = MUTATIONS[kind](files, rng)
        write_files(directory, files)
        return kind, what, source

    return attack(load_case, sources, make_case, options, outcomes=OUTCOMES, num_allowed=2, seconds=SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
