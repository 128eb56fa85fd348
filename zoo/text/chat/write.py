"""Write a chat template into a checkpoint directory, with the token at which its answers end."""

from pathlib import Path
from typing import Any

from zoo._files import read_json, write_json, write_text

from ..tokenizers import Tokenizer
from .encode import find_end_of_turn
from .errors import ChatError
from .template import TEMPLATE_FILE, ChatTemplate

_GENERATION_CONFIG = "generation_config.json"


def write_chat_files(directory: str | Path, template: ChatTemplate, tokenizer: Tokenizer) -> None:
    """Write `chat_template.jinja`, and add the end of a turn to `eos_token_id` of `generation_config.json`.

    Without it among `eos_token_id`, generation goes on after an answer. What generation_config.json has stays; one
    without `eos_token_id` starts from the one in config.json. Without an end of turn it is not written.

    **Raises** `ChatError` for a file that is damaged, and for an `eos_token_id` that is neither an integer nor a list
    of integers.
    """
    directory = Path(directory)
    end = find_end_of_turn(template, tokenizer)
    if end is not None:
        config = _read_object(directory / _GENERATION_CONFIG)
        present = _read_stop_tokens(config, directory / _GENERATION_CONFIG)
        if "eos_token_id" not in config:
            present = _read_stop_tokens(_read_object(directory / "config.json"), directory / "config.json")
        stops = list(dict.fromkeys([*present, end]))
        write_json(directory / _GENERATION_CONFIG, config | {"eos_token_id": stops if len(stops) > 1 else end})
    write_text(directory / TEMPLATE_FILE, template.source)


def _read_object(path: Path) -> dict[str, Any]:
    """Return a JSON object, empty without the file."""
    if not path.exists():
        return {}
    try:
        config = read_json(path)
    except (ValueError, OSError) as error:
        raise ChatError(str(error)) from None
    if not isinstance(config, dict):
        raise ChatError(f"{path} is not a JSON object")
    return config


def _read_stop_tokens(config: dict[str, Any], path: Path) -> list[int]:
    given = config.get("eos_token_id")
    if given is None:
        return []
    tokens = given if isinstance(given, list) else [given]
    if not all(type(token) is int for token in tokens):
        raise ChatError(f"{path}: eos_token_id = {given!r}, expected an integer or a list of integers")
    return tokens
