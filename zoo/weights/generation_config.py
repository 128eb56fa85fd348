"""Read generation_config.json of a checkpoint: tokens that end a text, and defaults of sampling."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo.models.hf.values import integer, list_of
from zoo.models.hf.wrappers import read_text_config

from .directory import CONFIG_NAME
from .safetensors import CheckpointError, read_json

_GENERATION_CONFIG_FILE = "generation_config.json"


def read_stop_tokens(directory: Path) -> list[int]:
    """Return the checkpoint's eos_token_id, one or several; an empty list if it has none.

    **Raises** `CheckpointError` for a value that is neither a token id nor a list of them.
    """
    for name in (_GENERATION_CONFIG_FILE, CONFIG_NAME):
        if (directory / name).exists():
            config = read_json(directory / name)
            tokens = config.get("eos_token_id", read_text_config(config).get("eos_token_id"))
            if tokens is None:
                tokens = []
            elif not isinstance(tokens, list):
                tokens = [tokens]
            if error := list_of(integer()).find_error(tokens):
                raise CheckpointError(f"{directory / name}: eos_token_id = {tokens!r} {error}")
            if tokens := [token for token in tokens if token >= 0]:  # some files say -1 for none
                return tokens
    return []


def read_start(directory: Path, config: Mapping[str, Any], start: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens that targets begin with: of generation_config.json, where transformers writes them since
    version 5, else of the config; `start` if neither names any.

    **Raises** `CheckpointError` for values that are not token ids.
    """
    path = directory / _GENERATION_CONFIG_FILE
    given = read_json(path) if path.exists() else {}
    tokens = []
    for key in ("decoder_start_token_id", "forced_bos_token_id"):
        token = given.get(key)
        if token is None:
            token = config.get(key)
        elif error := integer(minimum=0).find_error(token):
            raise CheckpointError(f"{path}: {key} = {token!r} {error}")
        if token is not None:
            tokens.append(token)
    return tuple(tokens) or start


def read_generation_defaults(directory: Path) -> dict[str, float | int]:
    """Return the sampling options of a checkpoint's generation_config.json: a temperature of 0 if it does not sample.

    **Raises** `CheckpointError` for a value that is not a number.
    """
    path = directory / _GENERATION_CONFIG_FILE
    if not path.exists():
        return {}
    config = read_json(path)
    options = {}
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        value = config.get(name)
        if value is None or (name == "top_k" and value == 0):  # transformers writes 0 for all
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{path}: {name} = {value!r}, expected a number")
        options[name] = value
    if config.get("do_sample") is False:
        options["temperature"] = 0.0
    return options
