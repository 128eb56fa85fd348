"""Read generation_config.json of a checkpoint: tokens that end a text, and defaults of sampling."""

from pathlib import Path

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


def read_start(directory: Path, start: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens that targets begin with: `start`, as the config has them, unless generation_config.json, where
    transformers writes them since version 5, has others.

    **Raises** `CheckpointError` for values that are not token ids.
    """
    path = directory / _GENERATION_CONFIG_FILE
    config = read_json(path) if path.exists() else {}
    keys = ("decoder_start_token_id", "forced_bos_token_id")
    named = [config.get(key) for key in keys]
    for key, token in zip(keys, named, strict=True):
        if token is not None and (error := integer(minimum=0).find_error(token)):
            raise CheckpointError(f"{path}: {key} = {token!r} {error}")
    listed = [*start, None][:2]
    chosen = [old if new is None else new for old, new in zip(listed, named, strict=True)]
    return (*(token for token in chosen if token is not None), *start[2:])


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
