"""Attack the loading of adapters: mutated directories of every method, loaded as `zoo.adapters.load` does.

    python scripts/attack/mutate_adapters.py                     # 1,000 mutations, some minutes
    python scripts/attack/mutate_adapters.py --cases 10000 --seed 1

The adapters are those of the tests, which PEFT wrote. No mutation may load as another adapter: each is refused with one
error that names its file or tensor, or loads every bit of the original. Exits 1 if any outcome is a forbidden one.
"""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scripts.attack.mutations import (
    CONFIG,
    MUTATIONS,
    WHOLE,
    Files,
    build_arrays,
    read_arrays,
    write_files,
)
from scripts.attack.watched import HANG, LARGE, RAW, attack, parse_options

FIXTURES = Path(__file__).parents[2] / "tests" / "fixtures"
NAMES = {CONFIG: "adapter_config.json", WHOLE: "adapter_model.safetensors"}
REFUSED_BY_DESIGN = ("lora_embedding_alone",)
REFUSED, EQUAL, WRONG, VAGUE = "refused by name", "loaded equal", "silently wrong", "vague refusal"
OUTCOMES = (REFUSED, EQUAL, WRONG, VAGUE, RAW, HANG, LARGE)
SECONDS = 60
_originals: dict[Path, tuple[Any, Any]] = {}


def drop_tensors(files: Files, rng: random.Random) -> str:
    """Leave out the tensors of a module, of a layer, of one kind, or all."""
    arrays = read_arrays(files[WHOLE])
    name = rng.choice(list(arrays))
    words = name.split(".")
    number = next((word for word in words if word.isdigit()), "0")
    choices: dict[str, Callable[[str], bool]] = {
        "module": lambda other: other.startswith(".".join(words[:-2])),
        "layer": lambda other: f".{number}." in other,
        "kind": lambda other: other.endswith(".".join(words[-2:])),
        "all": lambda other: True,
    }
    kind = rng.choice(list(choices))
    files[WHOLE] = build_arrays({other: x for other, x in arrays.items() if not choices[kind](other)})
    return f"without {kind} of {name}"


def change_dtype(files: Files, rng: random.Random) -> str:
    """Store a tensor as integers, bools or in 8 bits, or take its bits for integers."""
    import jax.numpy as jnp

    arrays = read_arrays(files[WHOLE])
    name = rng.choice(list(arrays))
    dtype = rng.choice(["bits", "int8", "uint8", "int64", "bool", "float8_e4m3fn", "float8_e5m2"])
    x = arrays[name]
    arrays[name] = x.view(f"int{8 * x.itemsize}") if dtype == "bits" else x.astype(np.dtype(getattr(jnp, dtype, dtype)))
    files[WHOLE] = build_arrays(arrays)
    return f"{name} is of {arrays[name].dtype}"


def change_option(files: Files, rng: random.Random) -> str:
    """Target other modules or ranks than the file has, or give a pattern that is not a regular expression."""
    config = json.loads(files[CONFIG])
    broken = rng.choice(["(", "[q", "*_proj", "q{2,1}", "(?P<q"])
    rank = (
        next(key for key in ("r", "init_r") if config.get(key)) if config["peft_type"] not in ("IA3", "OFT") else None
    )
    changes: dict[str, Any] = {
        "target_modules": [*(config.get("target_modules") or []), "o_proj", "dense", "c_fc", "out_proj", "x_proj"],
        "modules_to_save": [*(config.get("modules_to_save") or []), "lm_head", "norm"],
        "alpha_pattern": {broken: 3},
        "exclude_modules": rng.choice([[broken, 1], broken, ".*"]),
        "bias": "lora_only" if config.get("bias") != "lora_only" else "all",
        "target_parameters": [*(config.get("target_parameters") or []), "experts.gate_up_proj", "q_proj.weight"],
    } | ({rank: rng.choice([config[rank] + 1, 0, -1, str(config[rank]), True])} if rank else {})
    key = rng.choice(list(changes))
    config[key] = changes[key]
    files[CONFIG] = json.dumps(config).encode()
    return f"{key} = {config[key]!r:.60}"


KINDS: Mapping[str, Callable[[Files, random.Random], str]] = {
    **{kind: change for kind, change in MUTATIONS.items() if kind != "shards"},
    "tensors": drop_tensors,
    "dtype": change_dtype,
    "option": change_option,
}


def load_case(case: tuple[Path, Path]) -> tuple[str, str]:
    """Load a mutated adapter and compare it with its original; return the outcome and a detail."""
    import jax

    import zoo
    from zoo._terminal import escape_controls

    directory, source = case
    if source not in _originals:
        base = zoo.load(FIXTURES / "models" / json.loads((source / "meta.json").read_text())["base"], dtype="float32")
        _originals[source] = base, zoo.adapters.load(base, source)
    base, original = _originals[source]
    try:
        model = zoo.adapters.load(base, directory)
    except zoo.CheckpointError as error:
        message = str(error)
        names = message.count(str(directory)) and len(message) < 2000 and escape_controls(message, keep="\n") == message
        return (REFUSED if names else VAGUE), message
    if jax.tree.structure(model) != jax.tree.structure(original):
        return WRONG, "another structure"
    pairs = zip(jax.tree.leaves(model), jax.tree.leaves(original), strict=True)
    is_equal = all(x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
    return (EQUAL, "") if is_equal else (WRONG, "other numbers")


def main() -> int:
    options = parse_options(__doc__, cases=1000)
    sources = sorted(path.parent for path in (FIXTURES / "adapters").glob("*/adapter_config.json"))
    sources = [source for source in sources if source.name not in REFUSED_BY_DESIGN]

    def make_case(number: int, rng: random.Random, directory: Path) -> tuple[str, str, Path]:
        source, kind = sources[number % len(sources)], rng.choice(list(KINDS))
        files: Files = {ours: (source / theirs).read_bytes() for ours, theirs in NAMES.items()}
        what = KINDS[kind](files, rng)
        write_files(directory, {NAMES.get(name, name): content for name, content in files.items()})
        return kind, what, source

    return attack(load_case, sources, make_case, options, outcomes=OUTCOMES, num_allowed=2, seconds=SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
