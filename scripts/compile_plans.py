"""Compile training steps for TPUs and H100s that are not here, and write what they take: the truth that the estimate of
`zoo.plan` is held to.

    python scripts/compile_plans.py                       # every case that the file lacks
    python scripts/compile_plans.py --only v5e --limit 2

Needs the extras aot-tpu and aot-cuda, and JAX_PLATFORMS=cpu. A case takes ten seconds to four minutes on one core;
each is written when it is done.
"""

import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tyro

import zoo
from scripts.plan_cases import CASES, make_case

OUT = Path(__file__).parents[1] / "tests" / "tools" / "plan" / "compiled.json"


def main(*, out: Path = OUT, only: str = "", limit: int = 1000) -> None:
    """Compile the cases that the file lacks.

    Args:
        out: The JSON file, a list of cases.
        only: Part of a case's name.
        limit: Number of cases to compile.
    """
    rows: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
    known = {row["name"] for row in rows}
    for name in [name for name in CASES if only in name and name not in known][:limit]:
        start = time.perf_counter()
        row = compile_case(name)
        rows.append(row)
        rows.sort(key=lambda row: list(CASES).index(row["name"]))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
        print(f"{name:60} peak {row['peak'] or 0:>12,}  {time.perf_counter() - start:6.1f} s", flush=True)


def compile_case(name: str) -> dict[str, Any]:
    """Compile a case, and return what its row in the file says."""
    step, shapes = make_case(name, zoo.parallel.imagined(CASES[name].topology))
    program = zoo.inspect.compiled(step, *shapes)
    memory = program.memory
    assert memory is not None
    return {
        "name": name,
        "arguments": memory.arguments,
        "outputs": memory.outputs,
        "aliased": memory.aliased,
        "temporaries": memory.temporaries,
        "peak": memory.peak,
        "flops": program.compiled_flops,
        "collectives": [[c.kind, list(c.axes or ()), c.arrays, c.bytes] for c in program.collectives],
        "jaxlib": version("jaxlib"),
    }


if __name__ == "__main__":
    tyro.cli(main)
