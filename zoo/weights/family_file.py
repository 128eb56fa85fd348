"""Load a user-defined `Family` from a Python file."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

from zoo.models.hf.spec import Family

from .safetensors import CheckpointError


def load_family(path: str | Path) -> Family:
    """Return the one `Family` that a Python file defines. Runs the file, as an import would.

    **Raises** `CheckpointError` if there is no such file, or it does not define exactly one family.
    """
    path = Path(path)
    loader = SourceFileLoader(path.stem, str(path))
    spec = spec_from_loader(path.stem, loader)
    if not path.is_file() or spec is None:
        raise CheckpointError(f"there is no Python file {path}")
    module = module_from_spec(spec)
    # Compiled anew: Python takes an old .pyc if a file of the same size was written within the same second.
    exec(loader.source_to_code(loader.get_data(str(path)), str(path)), vars(module))
    defined = {name: x for name, x in vars(module).items() if isinstance(x, Family)}
    if len(defined) != 1:
        listed = "none"
        if defined:
            listed = f"{len(defined)}: {', '.join(sorted(defined))}"
        raise CheckpointError(f"{path} should define one zoo.models.Family, and has {listed}")
    return next(iter(defined.values()))
