"""From a run to a directory that other tools read: weights, configuration and tokens."""

import json
from pathlib import Path

import jax

from zoo._terminal import show
from zoo.models import Decoder
from zoo.text.run_data import RunData
from zoo.weights import NoFamilyError
from zoo.weights.save import write_model


def export(model: Decoder, data: RunData, directory: Path, *, seq_len: int) -> Path:
    """Write `model` as a Hugging Face directory, as `zoo.save` does, with the tokenizer and chat template of `data`.

    The configuration of a model made from scratch says that texts begin and end with the separator, and that it was
    trained on `seq` tokens. The configuration of a loaded model stays as it was, unless `seq` is more than it had.
    """
    separator = data.tokenizer.separator
    more = {"max_position_embeddings": seq_len}
    if model.origin is None:
        more = {"bos_token_id": separator, "eos_token_id": separator, **more}
    elif json.loads(model.origin.config).get("max_position_embeddings", seq_len) >= seq_len:
        more = {}
    write_model(model, directory, config=more)
    if jax.process_index() == 0:
        data.save(directory)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("exported")  # the others may go on to read what this one wrote
    return directory


def export_result(model: Decoder, data: RunData, directory: Path, *, seq_len: int, weights: str | None) -> None:
    """Export the model of a finished run and print its path; if no family holds the model, print where its weights are.

    - `weights`: path or URL of the run's newest checkpoint, None without one.

    **Raises** as `export` does in all other cases.
    """
    try:
        line = f"wrote the model to {export(model, data, directory, seq_len=seq_len)}"
    except NoFamilyError as error:
        line = f"no family holds {error.part}; weights are in {weights or 'no checkpoint'}; see Port a model"
    if jax.process_index() == 0:
        show(line)
