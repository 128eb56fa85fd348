"""Checks of tokens and batches where users pass them: one line that says what was expected and what came.

Keys, shapes and dtypes are known when a program is traced. Ids are checked where their values can be read, outside of
programs; inside one, an id outside the vocabulary gives NaN.
"""

import difflib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

BATCH_KEYS = ("tokens", "targets", "weights", "segment_ids", "positions")
"""Names of the arrays of a token batch, all of dims "batch seq"."""


def check_tokens(tokens: Any, vocab: int | None = None, *, name: str = "tokens") -> None:
    """Check that `tokens` are integers of dims "batch seq", and their values if `vocab` is given and they can be read.

    **Raises** `TypeError` for another type or dtype, and `ValueError` for other dims and an id outside the vocabulary.
    """
    if not hasattr(tokens, "shape") or not hasattr(tokens, "dtype"):
        raise TypeError(f'{name}: an array of integers "batch seq" was expected, not {type(tokens).__name__}')
    _check_integers(tokens, name)
    if len(tokens.shape) != 2:
        hint = f": {name}[None] is a batch of one row" if len(tokens.shape) == 1 else ""
        raise ValueError(f'{name}: an array of dims "batch seq" was expected, not of shape {tokens.shape}{hint}')
    if vocab is not None:
        check_ids(tokens, vocab, name=name)


def check_images(images: Any) -> None:
    """Check that `images` are floating point, of dims "batch channels height width".

    **Raises** `TypeError` for another type or dtype, and `ValueError` for other dims.
    """
    if not hasattr(images, "shape") or not hasattr(images, "dtype"):
        raise TypeError(f'images: an array "batch channels height width" was expected, not {type(images).__name__}')
    if not jax.numpy.issubdtype(images.dtype, np.floating):
        raise TypeError(f"images: normalized pixels in floating point were expected, not {images.dtype}")
    if len(images.shape) != 4:
        hint = ": images[None] is a batch of one" if len(images.shape) == 3 else ""
        raise ValueError(
            f'images: an array of dims "batch channels height width" was expected, not of shape {images.shape}{hint}'
        )


def check_ids(ids: Any, vocab: int, *, name: str, negative: bool = False) -> None:
    """Check that ids are in the vocabulary, if their values can be read; `negative` ones may be allowed.

    **Raises** `ValueError` with the first that is not.
    """
    if not is_host_readable(ids):
        return
    ids = np.asarray(jax.device_get(ids))
    is_outside = ids >= vocab if negative else (ids < 0) | (ids >= vocab)
    if is_outside.any():
        hint = "; a negative target is ignored" if negative else ""
        raise ValueError(f"{name}: {ids[is_outside][0]} is outside the vocabulary of {vocab} tokens{hint}")


def check_batch_keys(batch: Any) -> None:
    """**Raises** `TypeError` for a batch that is no mapping, and `ValueError` for one without `tokens`, or with a key
    that no model and no loss reads."""
    _require_mapping(batch)
    _require_key(batch, "tokens")
    for key in batch:
        if key not in BATCH_KEYS:
            nearest = difflib.get_close_matches(str(key), BATCH_KEYS, n=1)
            suggestion = f"; did you mean {nearest[0]!r}?" if nearest else ";"
            raise ValueError(
                f"the batch has a key {key!r} that nothing reads{suggestion} The keys are {', '.join(BATCH_KEYS)}. "
                "Take entries of your own out of the batch before this call."
            )


def check_batch(batch: Any, vocab: int | None = None) -> None:
    """Check keys, shapes and dtypes of a batch, and the ids if `vocab` is given and they can be read. Negative targets
    are allowed: they are ignored.

    **Raises** `TypeError` or `ValueError`, naming the key.
    """
    check_batch_keys(batch)
    _require_key(batch, "targets")
    check_tokens(batch["tokens"])
    shape = batch["tokens"].shape
    for key, x in batch.items():
        if np.shape(x) != shape:
            hint = ": one target per token, tokens[:, 1:] for tokens[:, :-1]" if key == "targets" else ""
            raise ValueError(f"{key}: the shape of tokens, {shape}, was expected, not {np.shape(x)}{hint}")
        if key != "weights":
            _check_integers(x, key)
    if vocab is not None:
        check_batch_ids(batch, vocab)


def check_batch_ids(batch: Any, vocab: int) -> None:
    """Check `tokens` and `targets` of a batch, if it has them and they can be read; negative targets are allowed.

    **Raises** `TypeError` for a batch that is no mapping, and `ValueError` for an id outside the vocabulary.
    """
    _require_mapping(batch)
    for name in ("tokens", "targets"):
        if name in batch:
            check_ids(batch[name], vocab, name=name, negative=name == "targets")


def is_host_readable(x: Any) -> bool:
    """Return True if the values of an array can be read: it is not traced and fully addressable by this process."""
    return not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)


def _require_mapping(batch: Any) -> None:
    if not isinstance(batch, Mapping):
        raise TypeError(f"a batch is a mapping with tokens and targets, not {type(batch).__name__}")


def _require_key(batch: Mapping[str, Any], key: str) -> None:
    if key not in batch:
        raise ValueError(f"the batch has no {key}, only {', '.join(map(str, batch)) or 'nothing'}")


def _check_integers(x: Any, name: str) -> None:
    if not np.issubdtype(x.dtype, np.integer):
        raise TypeError(f"{name}: integers were expected, not {x.dtype}")
