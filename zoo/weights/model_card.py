"""Write the model card of a saved directory: the README.md that the Hugging Face hub shows and reads."""

from collections.abc import Sequence
from pathlib import Path

from zoo._files import write_text

from .hub import is_hub_name

CARD_FILE = "README.md"


def write_model_card(directory: Path, text: str) -> None:
    """Write a model card, unless the directory has one."""
    if not (directory / CARD_FILE).exists():
        write_text(directory / CARD_FILE, text)


def describe_model(model_type: str, base: str | None, reader: str = "AutoModel") -> str:
    """Return the model card of a checkpoint. It does not depend on the directory: equal models have equal files.
    `reader` is the class of transformers that reads it."""
    origin = f" It was made from `{base}`." if base else ""
    return f"""{_format_header("transformers", base, ["equizoo", "jax"])}
# A {model_type} model

Saved by equizoo.{origin}

```python
import zoo

model = zoo.load("DIRECTORY")  # or its name on the hub
```

`transformers.{reader}.from_pretrained` reads it too.
"""


def describe_adapter(method: str, base: str | None) -> str:
    """Return the model card of an adapter."""
    known = base if base is not None and is_hub_name(base) else None  # the path of a directory is nobody's business
    origin = known or "its base model"
    return f"""{_format_header("peft", known, ["equizoo", "jax", method.lower()])}
# {method} for {origin}

Saved by equizoo.

```python
import zoo

model = zoo.adapters.load(zoo.load("{known or "BASE"}"), "DIRECTORY")  # or its name on the hub
```

`peft.PeftModel.from_pretrained` reads it too.
"""


def name_base(directory: Path) -> str | None:
    """Return the name on the hub of a directory in the hub's cache, `models--NAME/snapshots/COMMIT`; else None."""
    snapshots = directory.absolute().parent
    repository = snapshots.parent.name
    if snapshots.name != "snapshots" or not repository.startswith("models--"):
        return None
    return repository.removeprefix("models--").replace("--", "/")


def _format_header(library: str, base: str | None, tags: Sequence[str]) -> str:
    """Return the metadata that the hub reads."""
    lines = [f"library_name: {library}"]
    if base is not None:
        lines.append(f"base_model: {base.partition('@')[0]}")
    lines.append("tags:")
    lines += [f"- {tag}" for tag in tags]
    return "\n".join(["---", *lines, "---"])
