"""From a run to a directory that other tools read: weights, configuration and tokens."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from zoo import adapters
from zoo._terminal import show
from zoo.adapters.peft.write import write_adapter
from zoo.text.run_data import RunData
from zoo.weights.hub import is_hub_name
from zoo.weights.model_card import Training, name_base
from zoo.weights.save import NoFamilyError, write_model


def export(
    model: Any,
    data: RunData,
    directory: Path,
    *,
    seq_len: int,
    source: Path | None = None,
    training: Training | None = None,
    **entries: Any,
) -> Path:
    """Write `model` as a Hugging Face directory, as `zoo.save` does, with the tokenizer and chat template of `data`.

    The configuration of a model made from scratch says that texts begin and end with the separator, and that it was
    trained on `seq` tokens. The configuration of a loaded model stays as it was, unless `seq` is more than it had.
    `source` is the directory that the model was loaded from, as for `zoo.save`: how images become pixels, and tensors
    that were left aside. `entries` are further ones of the configuration; `training` is for the model card.
    """
    separator = data.tokenizer.separator
    more = {"max_position_embeddings": seq_len}
    if getattr(model, "origin", None) is None:
        more = {"bos_token_id": separator, "eos_token_id": separator, **more}
    elif json.loads(model.origin.config).get("max_position_embeddings", seq_len) >= seq_len:
        more = {}
    write_model(model, directory, source=source, config={**more, **entries}, training=training)
    if jax.process_index() == 0:
        data.save(directory)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("exported")  # the others may go on to read what this one wrote
    return directory


def export_adapters(model: Any, data: RunData, directory: Path, *, base: str | Path, training: Training) -> Any:
    """Write the adapters of `model`, of the checkpoint `base`, with the tokenizer of `data`; return the model with them
    merged. A model without adapters is returned as it is. `training` is for the model card."""
    if not adapters.adapter_names(model):
        return model
    write_adapter(model, directory, base=base, training=training)
    if jax.process_index() == 0:
        data.save(directory)
    return adapters.dequantize(adapters.merge(model, quantized="decode"))  # layers without adapters, too


def export_result(
    model: Any,
    data: RunData,
    directory: Path,
    *,
    seq_len: int,
    weights: str | None,
    training: Training,
    **options: Any,
) -> None:
    """Export the model of a finished run and print its path; if no family holds the model, print where its weights are.

    - `weights`: path or URL of the run's newest checkpoint, None without one.
    - `options`: further arguments of `export`.

    **Raises** as `export` does in all other cases.
    """
    try:
        path = export(model, data, directory, seq_len=seq_len, training=training, **options)
        line = f"wrote the model to {path}"
    except NoFamilyError as error:
        line = f"no family holds {error.part}; weights are in {weights or 'no checkpoint'}; see Port a model"
    if jax.process_index() == 0:
        show(line)


_FACTS = (
    *("data", "steps", "epochs", "batch_size", "seq_len", "learning_rate", "warmup_steps", "weight_decay", "dtype"),
    *("loss", "lora", "rank", "quantization"),
)


def describe_training(config: Mapping[str, Any], steps: int) -> Training:
    """Return what a model card says of a training of so many steps with the flags of a recipe: names on the hub, and of
    other paths the last part, since where they were is nobody's business."""
    base = config.get("checkpoint")
    if base is not None:
        base = str(base) if _is_on_hub(str(base)) else name_base(Path(base))
    facts = {name: config[name] for name in _FACTS if config.get(name) not in (None, 0, "none", (), [])}
    datasets = []
    if isinstance(facts.get("data"), list | tuple):
        shown = []
        for source in map(str, facts["data"]):
            name = re.split("[:=]", source)[0]  # without split and weight
            if _is_on_hub(name) and not Path(source).exists():
                datasets.append(name)
                shown.append(source)
            else:
                shown.append(Path(source).name)
        facts["data"] = ", ".join(shown)
    return Training(base, datasets, {**facts, "steps": steps})


def _is_on_hub(name: str) -> bool:
    return is_hub_name(name) and not Path(name).exists()
