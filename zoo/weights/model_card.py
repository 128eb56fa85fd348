"""Write the model card of a saved directory: the README.md that the Hugging Face hub shows and reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo._files import write_text

from .hub import is_hub_name

_TRAINING = "\n## Training\n"  # the last section, which a longer run writes anew


@dataclass(frozen=True)
class Training:
    """Training of a model, for its card: names of its base and its datasets on the hub, and facts to list."""

    base: str | None = None
    datasets: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def write_model_card(directory: Path, text: str) -> None:
    """Write a model card, unless the directory has one that differs in more than the training."""
    path = directory / "README.md"
    if not path.exists() or path.read_text(encoding="utf-8").partition(_TRAINING)[0] == text.partition(_TRAINING)[0]:
        write_text(path, text)


def describe_model(model_type: str, training: Training, reader: str, package: str = "") -> str:
    """Return the model card of a checkpoint. It does not depend on the directory: equal models have equal files.
    `reader` is the class of transformers that reads it, after an import of `package` if there is one."""
    first = f"import {package}  # registers the classes\n" if package else ""
    origin = f" It was made from `{training.base}`." if training.base else ""
    return f"""{_format_header("transformers", training.base, ["equizoo", "jax"], training.datasets)}
# A {model_type} model

Saved by equizoo.{origin}

```python
import zoo

model = zoo.load("DIRECTORY")  # or its name on the hub
```

In PyTorch:

```python
{first}import transformers

model = transformers.{reader}.from_pretrained("DIRECTORY")
```
{_format_facts(training)}"""


_READERS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
}
"""Classes of transformers by PEFT's task."""


def describe_adapter(method: str, base: str | None, task: str | None, training: Training) -> str:
    """Return the model card of an adapter for PEFT's `task`."""
    known = base if base is not None and is_hub_name(base) else training.base  # a path is nobody's business
    origin = known or "its base model"
    return f"""{_format_header("peft", known, ["equizoo", "jax", method.lower()], training.datasets)}
# {method} for {origin}

Saved by equizoo.

```python
import zoo

model = zoo.adapters.load(zoo.load("{known or "BASE"}"), "DIRECTORY")  # or its name on the hub
```

In PyTorch:

```python
import peft
import transformers

base = transformers.{_READERS.get(task or "", "AutoModel")}.from_pretrained("{known or "BASE"}")
model = peft.PeftModel.from_pretrained(base, "DIRECTORY")
```
{_format_facts(training)}"""


def name_base(directory: Path) -> str | None:
    """Return the name on the hub of a directory in the hub's cache, `models--NAME/snapshots/COMMIT`; else None."""
    snapshots = directory.absolute().parent
    repository = snapshots.parent.name
    if snapshots.name != "snapshots" or not repository.startswith("models--"):
        return None
    return repository.removeprefix("models--").replace("--", "/")


def _format_facts(training: Training) -> str:
    """Return the last section of a card, or nothing."""
    rows = [f"| {name} | {value} |\n" for name, value in training.facts.items()]
    return "".join([_TRAINING, "\n| | |\n|---|---|\n", *rows]) if rows else ""


def _format_header(library: str, base: str | None, tags: Sequence[str], datasets: Sequence[str] = ()) -> str:
    """Return the metadata that the hub reads."""
    lines = [f"library_name: {library}"]
    if base is not None:
        lines.append(f"base_model: {base.partition('@')[0]}")
    if datasets:
        lines += ["datasets:", *(f"- {name}" for name in datasets)]
    lines.append("tags:")
    lines += [f"- {tag}" for tag in tags]
    return "\n".join(["---", *lines, "---"])
