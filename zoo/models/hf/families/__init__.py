"""Families of checkpoints, one file of facts each: how a config maps to our layers, and how tensors are named.

The family of a `model_type` lies in the file of this name, which is imported when the family is looked up, and has the
file's name in capitals: `qwen3_moe.QWEN3_MOE`. Layers that only one family has lie beside it, in `NAME_layers.py`,
and the encoder of images of a larger model in `NAME_vision.py`.
"""

import functools
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from types import ModuleType

from zoo.models.hf.spec import Family

_HYPHENATED = ("blenderbot-small", "deberta-v2", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl")
"""Model types with hyphens, which their files spell with underscores."""
_NOT_FAMILIES = ("_layers", "_vision")
"""Endings of the names of files that have parts of a family."""


@functools.cache
def _list_files() -> dict[str, str]:
    """Return the file of each `model_type`, sorted."""
    names = {name.replace("-", "_"): name for name in _HYPHENATED}
    files = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.endswith(_NOT_FAMILIES)]
    return dict(sorted((names.get(file, file), file) for file in files))


def import_family_file(name: str) -> ModuleType:
    """Import the file of a family. **Raises** `KeyError` for a name that no family has."""
    return importlib.import_module(f"{__name__}.{_list_files()[name]}")


class _Families(Mapping[str, Family]):
    """Families by `model_type`. Iterating over the names imports no file, and over the families all of them."""

    def __getitem__(self, name: str) -> Family:
        return getattr(import_family_file(name), _list_files()[name].upper())

    def __iter__(self) -> Iterator[str]:
        return iter(_list_files())

    def __len__(self) -> int:
        return len(_list_files())


FAMILIES = _Families()
ALIASES: dict[str, str] = {
    "AXK1": "axk1",
    "Dream": "dream",
    "gpt-sw3": "gpt2",
    "kimi_k2": "deepseek_v3",
}
"""Other names that files give to a family: `model_type` -> the family's own. Only names whose classes compute the same
with the same defaults. A config keeps the name that it came with."""


def get_family(model_type: str) -> Family | None:
    """Return the family of a `model_type`, by its own name or an alias; None if there is none."""
    return FAMILIES.get(ALIASES.get(model_type, model_type))


__all__ = ["ALIASES", "FAMILIES", "get_family"]
