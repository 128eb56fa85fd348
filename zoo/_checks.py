"""Checks of tokens, masks, keys and batches where users pass them: one line that says what was expected and what came.

Keys, shapes and dtypes are known when a program is traced. Values are checked where they can be read, outside of
programs; inside one, an id outside the vocabulary gives NaN.
"""

import contextlib
import difflib
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Key

BATCH_KEYS = ("tokens", "targets", "weights", "segment_ids", "positions", "reference")
"""Names of the arrays of a token batch, all of dims "batch seq". No model reads `reference`: it is log p of the targets
under a reference model, for a loss of preferences (`zoo.train.precompute_reference`)."""
SOURCE_KEYS = ("source", "source_mask")
"""Names of the arrays of a batch that an encoder-decoder reads besides: sources, "batch seq", and their padding
mask."""
PLACE_KEYS = ("lookahead", "coordinates")
"""Names of the arrays of a batch that say where its images stand (`zoo.layers.TokenInfo`): "batch seq", and
"batch seq axes"."""
_FLOAT_KEYS = ("weights", "reference", "coordinates")
_DTYPES = ("float32", "bfloat16", "float16")
_DTYPE_WORDS = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "full": "float32"}
"""Other names of dtypes, and the dtype."""


def check_tokens(tokens: Any, vocab: int | None = None, *, name: str = "tokens") -> None:
    """Check that `tokens` are integers of dims "batch seq", and their values if `vocab` is given and they can be read.

    **Raises** `TypeError` for another type or dtype, and `ValueError` for other dims and an id outside the vocabulary.
    """
    if not hasattr(tokens, "shape") or not hasattr(tokens, "dtype"):
        raise TypeError(f'{name}: expected an array of integers "batch seq", got {type(tokens).__name__}')
    _refuse_tensor(tokens, name)
    _check_integers(tokens, name)
    if len(tokens.shape) != 2:
        hint = f": {name}[None] is a batch of one row" if len(tokens.shape) == 1 else ""
        raise ValueError(f'{name}: expected an array of dims "batch seq", got one of shape {tokens.shape}{hint}')
    if vocab is None:
        check_int32(tokens, name)
    else:
        check_ids(tokens, vocab, name=name)


def check_token_arrays(tokens: Any, *, mask: Any = None, **integers: Any) -> None:
    """Check `mask`, `segment_ids`, `positions` and `token_types`, each of them or None, which describe the tokens of a
    batch: dtypes and shapes always, values where they can be read.

    **Raises** `ValueError` for a `mask` together with `segment_ids` or `positions`, for a shape that is not the shape
    of `tokens`, and as `check_segment_ids` and `check_mask`; `TypeError` for another type or dtype.
    """
    given = {name: x for name, x in integers.items() if x is not None}
    if mask is not None and ("segment_ids" in given or "positions" in given):
        raise ValueError("pass mask alone, or segment_ids and positions: padding is a segment of its own")
    if mask is not None:
        check_mask(mask, tokens)
    for name, x in given.items():
        _check_shape(x, name, tokens)
        _check_integers(x, name)
        check_int32(x, name)
    if "segment_ids" in given:
        check_segment_ids(given["segment_ids"])


def check_mask(mask: Any, tokens: Any) -> None:
    """Check that `mask` is a padding mask of `tokens`: booleans, or integers that are seen to be 0 and 1.

    **Raises** `TypeError` for another type or dtype, and for integers inside a program, where they might be segment
    ids; `ValueError` for another shape or other integers, and for padding between the real tokens of a row.
    """
    _check_shape(mask, "mask", tokens)
    is_boolean = mask.dtype == bool
    if not is_boolean and not np.issubdtype(mask.dtype, np.integer):
        raise TypeError(f"mask: expected booleans, True for real tokens, got {mask.dtype}")
    if not is_host_readable(mask):
        if not is_boolean:
            raise TypeError(f"mask: inside a program expected booleans, got {mask.dtype}: take mask > 0")
        return
    values = np.asarray(jax.device_get(mask))
    if not is_boolean and (is_other := (values != 0) & (values != 1)).any():
        raise ValueError(
            f"mask: expected booleans, or 0 and 1, got {values[is_other][0]}: segment ids of packed rows are not a mask"
        )
    is_start = np.diff(values.astype(np.int8), axis=1, prepend=0) > 0
    if len(rows := np.flatnonzero(is_start.sum(1) > 1)):
        raise ValueError(
            f"mask: row {rows[0]} has padding between its real tokens, where padding is left or right of them"
        )


def check_segment_ids(segment_ids: Any) -> None:
    """Check the values of segment ids, if they can be read: each document of a row has an id above 0 of its own, and 0
    is padding.

    **Raises** `ValueError` for a negative id, and for one that comes again after another.
    """
    if not is_host_readable(segment_ids):
        return
    ids = np.asarray(jax.device_get(segment_ids)).astype(np.int64)
    if (ids < 0).any():
        raise ValueError(f"segment_ids: documents count from 1, and 0 is padding; {ids[ids < 0][0]} is neither")
    is_start = np.diff(ids, axis=1, prepend=0) != 0
    rows, columns = np.nonzero(is_start & (ids != 0))
    documents, counts = np.unique(rows << 32 | ids[rows, columns], return_counts=True)
    if (counts > 1).any():
        row, repeated = divmod(int(documents[counts > 1][0]), 2**32)
        raise ValueError(
            f"segment_ids: in row {row} {repeated} comes again after another id: give each document of a row an id of "
            "its own"
        )


def describe_argument(x: Any) -> str:
    """Return what was passed where something else was expected: "an array float32[2, 3]", "the class Decoder",
    "the function loss", "dict"."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"an array {x.dtype}{list(x.shape)}"
    if isinstance(x, type):
        return f"the class {x.__name__}"
    if isinstance(x, FunctionType):
        return f"the function {x.__name__}"
    return type(x).__name__


def check_not_donated(tree: Any) -> None:
    """**Raises** `RuntimeError`, as JAX does, for arrays that a program was given to reuse their memory."""
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted():
            raise RuntimeError(
                "the model or another argument was donated to an earlier call, which has reused its memory: go on with "
                "the result of that call, or compile it without donate="
            )


def check_int32(x: Any, name: str) -> None:
    """Check that 64-bit integers of NumPy fit into 32 bits, which JAX takes of them without a word.

    **Raises** `ValueError` with the first that does not.
    """
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "iu" or x.dtype.itemsize < 8 or x.size == 0:
        return
    limits = np.iinfo(np.int32)
    if x.min() < limits.min or x.max() > limits.max:
        outside = x[(x < limits.min) | (x > limits.max)][0]
        raise ValueError(f"{name}: {outside} does not fit into 32 bits, which is all that JAX takes of {x.dtype}")


def wrap_key(key: Any) -> Key[Array, "..."]:
    """Return a typed PRNG key, or an array of them: of `jax.random.key`, or raw as `jax.random.PRNGKey` makes them.

    **Raises** `TypeError` for anything else.
    """
    dtype = getattr(key, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return key
    if dtype == np.uint32 and key.ndim > 0:
        return jax.random.wrap_key_data(jnp.asarray(key))
    raise TypeError(f"key: expected a PRNG key, as jax.random.key(0) makes it, got {describe_argument(key)}")


def check_images(images: Any) -> None:
    """Check that `images` are floating point, of dims "batch channels height width".

    **Raises** `TypeError` for another type or dtype, and `ValueError` for other dims.
    """
    if not hasattr(images, "shape") or not hasattr(images, "dtype"):
        raise TypeError(f'images: expected an array "batch channels height width", got {type(images).__name__}')
    _refuse_tensor(images, "images")
    if not jax.numpy.issubdtype(images.dtype, np.floating):
        raise TypeError(f"images: expected normalized pixels in floating point, got {images.dtype}")
    if len(images.shape) != 4:
        hint = ": images[None] is a batch of one" if len(images.shape) == 3 else ""
        raise ValueError(
            f'images: expected an array of dims "batch channels height width", got one of shape {images.shape}{hint}'
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


def check_chunk(chunk: int | None, shape: tuple[int, ...]) -> None:
    """**Raises** `ValueError` for a `chunk` below 1, and for tokens without a row or column: no chunk has any."""
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is a number of tokens, at least 1, not {chunk}")
    if 0 in shape:
        raise ValueError(f"tokens: expected at least 1 row and 1 token, got shape {shape}")


def check_temperature(temperature: Any) -> None:
    """**Raises** `ValueError` for a number that is not above 0, if it can be read."""
    if not isinstance(temperature, Tracer) and not temperature > 0:
        raise ValueError(f"temperature={temperature}: expected a number above 0")


def parse_dtype(dtype: Any, *, name: str = "dtype") -> np.dtype:
    """Return the dtype of parameters that `dtype` names.

    **Raises** `TypeError` for what is not a dtype, and `ValueError` for one that is not floating point.
    """
    parsed = None
    if dtype is not None:
        with contextlib.suppress(TypeError, ValueError):
            parsed = jax.numpy.dtype(dtype)
    if parsed is None:
        word = str(dtype).removeprefix("torch.").lower()
        nearest = _DTYPE_WORDS.get(word) or next(iter(difflib.get_close_matches(word, _DTYPES, n=1, cutoff=0.5)), None)
        if nearest:
            suggestion = f"; did you mean {nearest!r}?"
        else:
            suggestion = f", as one of {', '.join(_DTYPES)}"
        raise TypeError(f"{name}={dtype!r}: expected a dtype{suggestion}")
    if not jax.numpy.issubdtype(parsed, np.floating):
        raise ValueError(f"{name}={parsed}: parameters are floating point, say {', '.join(_DTYPES)}")
    return parsed


def check_batch_keys(batch: Any) -> None:
    """**Raises** `TypeError` for a batch that is not a mapping, and `ValueError` for one without `tokens` or with a key
    that neither a model nor a loss reads."""
    _require_mapping(batch)
    _require_key(batch, "tokens")
    for key in batch:
        if key not in (*BATCH_KEYS, *PLACE_KEYS):
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
        _require_array(x, key)
        if np.shape(x) != shape and not (key == "coordinates" and np.shape(x)[:-1] == shape):
            if key == "targets":
                hint = ": one target per token, tokens[:, 1:] for tokens[:, :-1]"
            else:
                hint = ""
            raise ValueError(f"{key}: expected the shape of tokens, {shape}, got {np.shape(x)}{hint}")
        if key not in _FLOAT_KEYS:
            _check_integers(x, key)
        check_numpy_values(x, key)
    if vocab is not None:
        check_batch_ids(batch, vocab)


def check_batch_types(batch: Any) -> None:
    """**Raises** `TypeError` if something under a name of a token batch is not an array, such as a list."""
    if isinstance(batch, Mapping):
        for name in BATCH_KEYS:
            if name in batch:
                _require_array(batch[name], name)


def check_batch_ids(batch: Any, vocab: int) -> None:
    """Check `tokens` and `targets` of a batch, if it has them and they can be read; negative targets are allowed.

    **Raises** `TypeError` for a batch that is not a mapping, and `ValueError` for an id outside the vocabulary.
    """
    _require_mapping(batch)
    for name in ("tokens", "targets"):
        if name in batch:
            check_ids(batch[name], vocab, name=name, negative=name == "targets")


def check_numpy_values(x: Any, name: str) -> None:
    """Check the values of an array of NumPy before it goes to a device, as `check_int32` and, if it is named
    `segment_ids`, `check_segment_ids`. `name` may be a path: `0.segment_ids`."""
    check_int32(x, name)
    if isinstance(x, np.ndarray) and x.ndim == 2 and name.rpartition(".")[2] == "segment_ids":
        check_segment_ids(x)


def is_host_readable(x: Any) -> bool:
    """Return True if the values of an array can be read: it is not traced and fully addressable by this process."""
    return not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)


def _require_array(x: Any, name: str) -> None:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name}: expected an array, got {type(x).__name__}")
    _refuse_tensor(x, name)


def _refuse_tensor(x: Any, name: str) -> None:
    if type(x).__module__.partition(".")[0] == "torch":
        raise TypeError(f"{name}: expected an array of JAX or NumPy, got a tensor of PyTorch: pass x.numpy()")


def _require_mapping(batch: Any) -> None:
    if not isinstance(batch, Mapping):
        raise TypeError(f"a batch is a mapping with tokens and targets, not {type(batch).__name__}")


def _require_key(batch: Mapping[str, Any], key: str) -> None:
    if key not in batch:
        raise ValueError(f"the batch has no {key}, only {', '.join(map(str, batch)) or 'nothing'}")


def _check_integers(x: Any, name: str) -> None:
    if not np.issubdtype(x.dtype, np.integer):
        raise TypeError(f"{name}: expected integers, got {x.dtype}")


def _check_shape(x: Any, name: str, tokens: Any) -> None:
    _require_array(x, name)
    if tuple(x.shape) != tuple(tokens.shape):
        raise ValueError(f"{name}: expected the shape of tokens, {tuple(tokens.shape)}, got {tuple(x.shape)}")
