"""Load a checkpoint to evaluate: model, tokenizer, the tokens that begin and end a text, and the chat template."""

import json
from pathlib import Path

from zoo import adapters
from zoo.adapters.peft.config import CONFIG_FILE
from zoo.models import Decoder
from zoo.parallel import Mesh
from zoo.text.chat.template import ChatTemplate, read_special_tokens
from zoo.text.tokenizer_file import TOKENIZER_FILE
from zoo.text.tokenizers import find_tokenizer
from zoo.weights.directory import resolve_directory
from zoo.weights.generation_config import read_stop_tokens
from zoo.weights.load import load

from .language_model import LanguageModel

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_LENGTH = 2048
"""Tokens at a time of a model whose config names no maximum, as in lm_eval."""


def load_language_model(
    directory: str | Path,
    *,
    mesh: Mesh | None = None,
    dtype: str | None = None,
    adapter: str | Path | None = None,
    batch: int = 8,
    length: int | None = None,
    chat: bool = False,
    progress: bool = False,
) -> LanguageModel:
    """Load a checkpoint directory, or a name on the Hugging Face hub, as a `LanguageModel`.

    - `adapter`: directory or name of a PEFT adapter, which is merged into the model.
    - `length`: by default the maximum that config.json names, else 2,048.
    - `chat`: read the chat template.

    The token before a text without context is BOS, or EOS without one. A text ends at the stop tokens of
    generation_config.json, and at EOS.

    **Raises** `CheckpointError` as `zoo.load` and `zoo.adapters.load` do; `ValueError` for a checkpoint without a
    tokenizer, and, with `chat`, for one without a template, before the model is loaded; `TypeError` for a model that is
    not a decoder.
    """
    path = resolve_directory(directory)
    if adapter is not None:
        adapter = resolve_directory(adapter, config=CONFIG_FILE)
    template = ChatTemplate.read(path) if chat else None
    names = read_special_tokens(path)
    stops = read_stop_tokens(path)
    model = load(path, mesh=mesh, dtype=dtype)
    if not isinstance(model, Decoder):
        raise TypeError(f"{path} is read as {type(model).__name__}, and only a Decoder has likelihoods of texts")
    if adapter is not None:
        model = adapters.merge(adapters.load(model, adapter))
    vocab, _ = model.embedding.table_shape
    tokenizer = find_tokenizer(path, vocab)
    if tokenizer is None:
        raise ValueError(
            f"{path} has no {TOKENIZER_FILE}, and a vocabulary of {vocab} is not bytes: text cannot be tokenized"
        )
    begin = tokenizer.special_tokens.get(names.get("bos_token", ""))
    end = tokenizer.special_tokens.get(names.get("eos_token", ""))
    stops = [token for token in stops if token < vocab]
    if end is not None and end not in stops:
        stops.append(end)
    candidates = (begin, *tokenizer.prefix, end, *stops)
    return LanguageModel(
        model,
        tokenizer,
        mesh,
        batch=batch,
        length=_find_length(model) if length is None else length,
        prefix_token=next((token for token in candidates if token is not None), None),
        stop_tokens=stops,
        template=template,
        progress=progress,
    )


def _find_length(model: Decoder) -> int:
    if model.origin is None:
        return _LENGTH
    config = json.loads(model.origin.config)
    return next((config[key] for key in _LENGTH_KEYS if isinstance(config.get(key), int)), _LENGTH)
