"""Models of published sizes, initialized from scratch. A preset is a config.json that its family builds."""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtyping import Array, Key

from ..decoder import Decoder
from ..hf.config import read_config
from ..hf.errors import ConfigError
from ..hf.families import FAMILIES
from ..hf.rope_config import ROPE_CONFIG_KEYS
from ..hf.spec import Origin


@dataclasses.dataclass(frozen=True)
class Preset:
    """A published model."""

    family: str
    """The `model_type` of its config."""
    source: str
    """Repository on the Hugging Face hub whose config.json it is."""
    parameters: int
    """Published number of parameters."""
    config: Mapping[str, Any]
    """Keys of its config.json that change the result and differ from the defaults of the family."""
    active_parameters: int | None = None
    """Published number of active parameters of a mixture of experts, rounded or truncated."""
    active_excludes_embedding: bool = False
    """True if `active_parameters` leaves out the embedding, which `count_active_parameters` counts in full."""


def _read_presets() -> dict[str, Preset]:
    entries = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return {name: Preset(**entry) for name, entry in entries.items()}


PRESETS = _read_presets()
"""The presets of published.json by name, each a config.json without the keys that are defaults of the family."""


def preset(name: str, /, *, key: Key[Array, ""], **changes: Any) -> Decoder:
    """Build a model of a published size with new weights: `preset("llama3-8b", key=key)`. `list_presets()` returns the
    names.

    - `changes`: config.json keys to replace, under the family's names or the canonical ones. `num_hidden_layers=2`
      makes a small model of the same architecture.

    `zoo.save` writes the model as a checkpoint of its family, which `zoo.load` and transformers read. To initialize it
    sharded over a mesh: `zoo.init(lambda key: zoo.models.preset("llama3-8b", key=key), key, mesh)`.

    Sizes and architecture are as published, the initialization is as in `Transformer`: matrices have standard deviation
    1 / sqrt(inputs); matrices that write to the residual stream are divided by sqrt(2 layers) (GPT-2, section 2.3), by
    sqrt(layers) in a Mamba layer, which has one; embeddings have 1 / sqrt(hidden_size); biases are zero, norms one.
    Time steps, decays and token shifts follow their papers (`zoo.layers`). Dropout is not used. Parameters are float32.

    **Raises** `ValueError` for an unknown name, with the nearest ones, and its subclass `ConfigError` for invalid
    changes.
    """
    entry = find_preset(name)
    family = FAMILIES[entry.family]
    config = _override_config(entry, changes)
    try:
        model = family.build(read_config(family, config, ignore=None), key=key)
    except ValueError as error:  # an invalid key, or sizes that do not fit together
        raise ConfigError(f"{name} with another {' and '.join(changes)}: {error}") from None
    return dataclasses.replace(model, origin=Origin(family, json.dumps(config)))


def list_presets() -> tuple[str, ...]:
    """Return the names of all presets."""
    return tuple(PRESETS)


def find_preset(name: str) -> Preset:
    """Return a preset by name. **Raises** `ValueError` for an unknown name, with the nearest ones."""
    if name in PRESETS:
        return PRESETS[name]
    short_name = name.lower().rpartition("/")[2].removeprefix("meta-")  # names on the hub are longer
    matches = difflib.get_close_matches(short_name, PRESETS, n=4, cutoff=0.6)
    if matches:
        hint = f"nearest are {', '.join(matches)}"
    else:
        hint = f"there are {', '.join(PRESETS)}"
    raise ValueError(f"there is no preset {name!r}; {hint}")


def _override_config(entry: Preset, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preset's config.json with these keys replaced."""
    family = FAMILIES[entry.family]
    if "model_type" in changes:
        raise ConfigError(f"model_type cannot be changed: the preset is a {family.name}")
    replaced = {family.aliases.get(key, key) for key in changes}
    if "rope_parameters" in replaced:  # it replaces several keys of the older spelling
        replaced.update(ROPE_CONFIG_KEYS)
    unchanged = {key: value for key, value in entry.config.items() if family.aliases.get(key, key) not in replaced}
    return {"architectures": [family.architecture], "model_type": family.name, **unchanged, **changes}
