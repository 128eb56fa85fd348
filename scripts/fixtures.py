"""The loop over reference cases that scripts/make_fixtures.py and scripts/make_adapter_fixtures.py share."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def write_cases(
    make: Callable[[str, Path], Any], names: Iterable[str], out: Path, torch: Any, transformers: Any
) -> None:
    """Write each case to a folder of `out`; print its size and the checks that `make(name, folder)` returns.

    `torch` and `transformers` are passed as modules, since neither is a dependency.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # a fixed order of summation
    for name in names:
        checks = make(name, out / name)
        size = sum(path.stat().st_size for path in (out / name).iterdir() if path.is_file())
        print(f"{name:22}{size / 1000:5.1f} kB  {checks}", flush=True)
