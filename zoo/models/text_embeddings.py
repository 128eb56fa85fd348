"""Embeddings: one vector per text, with its images if it has some, pooled as sentence-transformers' files of the
checkpoint say; of two towers, one per text or image."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo._checks import check_token_arrays
from zoo.layers.encoders.patches import PatchedImages
from zoo.layers.encoders.pooling import take_first_token
from zoo.layers.token_info import token_info
from zoo.parallel import num_shards
from zoo.shapes import HiddenStates, PaddingMask, Tokens

from .decoder import Decoder
from .encoders.heads import average_tokens
from .encoders.image import Images
from .encoders.text import Encoder
from .encoders.towers import TwoTowers
from .hf.spec import Origin
from .image_text import ImageText, SeenImages, check_texts, read_images

MODULES_FILE = "modules.json"
NORMALIZE = "normalize"
_MODULE_PACKAGE = "sentence_transformers."


class Pooling(NamedTuple):
    """Pooling of tokens to one vector: `modes`, concatenated, and divided by the norm if `normalized`."""

    modes: tuple[str, ...]
    normalized: bool = False
    size: int | None = None
    """Features of a token that the checkpoint says; None if it does not."""


def embed(
    model: Decoder | Encoder | ImageText | TwoTowers,
    tokens: Tokens | None = None,
    mask: PaddingMask | None = None,
    *,
    images: Images | PatchedImages | SeenImages | None = None,
    pooling: str | Sequence[str] | None = None,
) -> Float[Array, "batch features"]:
    """Return one vector per text, in float32: hidden states after the final norm, pooled (Sentence-BERT, Reimers and
    Gurevych, arXiv:1908.10084). Of `TwoTowers`, one vector of norm 1 per text, or per image of `images`. Of an
    `ImageText`, one vector per text with its images, whose tokens are pooled as others are.

    - `mask`: padding mask, True or 1 for real tokens. The result depends neither on the padding nor on its side. A row
      of padding only gives NaN.
    - `pooling`: by default what `modules.json` of the checkpoint's directory says. Else a name of `POOLINGS` or
      several, which are concatenated, and last "normalize" for vectors of norm 1: `("mean", "normalize")`.

    | mode | of the n tokens x_1 ... x_n of a row |
    |---|---|
    | `cls` | x_1 |
    | `max` | the maximum of each feature |
    | `mean` | the sum of x_i / n |
    | `mean_sqrt_len_tokens` | the sum of x_i / sqrt(n) |
    | `weightedmean` | the sum of i x_i / the sum of i (SGPT, Muennighoff, arXiv:2202.08904) |
    | `lasttoken` | x_n |

    A head is not applied, so that models of any head have embeddings.

    **Raises** `TypeError` for another model, and for images where it has no tower of images; `TypeError` and
    `ValueError` for tokens, images and a mask as the model; `ValueError` for texts and images in one call, and for
    `pooling` with two towers, which have poolers; `ValueError` for an unknown mode, without `pooling` for a checkpoint
    that says none, and for sentence-transformers' modules other than Transformer, Pooling and Normalize;
    `NotImplementedError` where the sequence is sharded.
    """
    if isinstance(model, TwoTowers):
        return _embed_by_tower(model, tokens, mask, images, pooling)
    if not isinstance(model, Decoder | Encoder | ImageText):
        raise TypeError(f"embeddings of texts are made by a Decoder or an Encoder, not by {type(model).__name__}")
    if tokens is None or (images is not None and not isinstance(model, ImageText)):
        raise TypeError(
            f"{type(model).__name__} embeds tokens, and images are embedded by TwoTowers, or by ImageText with tokens"
        )
    check_texts(model, tokens, images)
    check_token_arrays(tokens, mask=mask)
    if num_shards(tokens, "seq") > 1:
        raise NotImplementedError("a row is pooled on one device, and the mesh shards the sequence: take context=1")
    chosen = find_pooling(model.origin) if pooling is None else _parse_modes(pooling)
    if mask is not None:
        mask = jnp.asarray(mask, bool)
    return _embed(model, tokens, images, mask, chosen)


def _embed_by_tower(model: TwoTowers, tokens: Any, mask: Any, images: Any, pooling: Any) -> Array:
    if (tokens is None) == (images is None):
        raise ValueError("TwoTowers embed texts or images: pass tokens, or images=, and the other in a call of its own")
    if pooling is not None:
        raise ValueError(f"pooling={pooling!r}: the towers have poolers of their own")
    if images is not None and mask is not None:
        raise ValueError("mask is of tokens, and images were given: leave it out")
    return _run_tower(model, tokens, mask, images)


@eqx.filter_jit
def _run_tower(model: TwoTowers, tokens: Any, mask: Any, images: Any) -> Array:
    if images is not None:
        return model.embed_images(images)
    vectors = model.embed_texts(tokens, mask=mask)
    if mask is None:
        return vectors
    return jnp.where(jnp.any(mask, axis=1, keepdims=True), vectors, jnp.nan)


@eqx.filter_jit
def _embed(
    model: Decoder | Encoder | ImageText,
    tokens: Tokens,
    images: Any,
    mask: PaddingMask | None,
    pooling: Pooling,
) -> Float[Array, "batch features"]:
    reader, info = read_images(model, tokens, images, token_info(tokens, mask=mask))
    hidden, _ = reader.hidden(tokens, info)
    x = hidden.x.astype(jnp.float32)
    if pooling.size not in (None, x.shape[-1]):
        raise ValueError(f"the checkpoint pools {pooling.size} features of a token, and the model has {x.shape[-1]}")
    if mask is None:
        mask = jnp.ones(tokens.shape, bool)
    pooled = jnp.concatenate([POOLINGS[mode](x, mask) for mode in pooling.modes], axis=-1)
    pooled = jnp.where(mask.any(1, keepdims=True), pooled, jnp.nan)
    if not pooling.normalized:
        return pooled
    return pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)


def _take_maximum(x: HiddenStates, mask: PaddingMask) -> Float[Array, "batch embed"]:
    return jnp.where(mask[..., None], x, -jnp.inf).max(1)


def _sum_over_root(x: HiddenStates, mask: PaddingMask) -> Float[Array, "batch embed"]:
    return average_tokens(x, mask) * jnp.sqrt(mask.sum(1, keepdims=True))


def _average_by_position(x: HiddenStates, mask: PaddingMask) -> Float[Array, "batch embed"]:
    weights = jnp.where(mask, jnp.cumsum(mask, axis=1), 0).astype(x.dtype)[..., None]
    return (x * weights).sum(1) / weights.sum(1)


def _take_last_token(x: HiddenStates, mask: PaddingMask) -> Float[Array, "batch embed"]:
    return take_first_token(x[:, ::-1], mask[:, ::-1])


POOLINGS: Mapping[str, Callable[..., Float[Array, "batch embed"]]] = {
    "cls": take_first_token,
    "max": _take_maximum,
    "mean": average_tokens,
    "mean_sqrt_len_tokens": _sum_over_root,
    "weightedmean": _average_by_position,
    "lasttoken": _take_last_token,
}
"""Functions of hidden states and a padding mask, by mode, in the order in which the modes of a file are joined."""

_MODE_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def _parse_modes(pooling: str | Sequence[str]) -> Pooling:
    """**Raises** `ValueError` for an unknown mode, for none, and for "normalize" before the last place."""
    modes = (pooling,) if isinstance(pooling, str) else tuple(pooling)
    normalized = modes[-1:] == (NORMALIZE,)
    if normalized:
        modes = modes[:-1]
    if unknown := [mode for mode in modes if mode not in POOLINGS]:
        raise ValueError(f"pooling {unknown[0]!r}: known are {', '.join(POOLINGS)}, and {NORMALIZE} in the last place")
    if not modes:
        raise ValueError(f"pooling {pooling!r} names no mode: known are {', '.join(POOLINGS)}")
    return Pooling(modes, normalized)


def find_pooling(origin: Origin | None) -> Pooling:
    """Return the pooling that a checkpoint's sentence-transformers files say.

    **Raises** `ValueError` for a checkpoint without them, and for modules or keys that are not covered.
    """
    files = {} if origin is None else dict(origin.sentence_files)
    if MODULES_FILE not in files:
        raise ValueError(f"the model comes with no {MODULES_FILE}, which says how to pool: pass pooling='mean', say")
    modules = json.loads(files[MODULES_FILE])
    kinds = [_find_module_kind(module["type"]) for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ValueError(
            f"{MODULES_FILE} has the modules {', '.join(kinds)}, and covered are Transformer, Pooling and, if need be, "
            "Normalize, in this order: pass pooling= to embed without them"
        )
    path = f"{modules[1]['path']}/config.json"
    if path not in files:
        raise ValueError(f"{MODULES_FILE} names {path}, and the checkpoint has none: pass pooling=")
    return _read_pooling_config(path, json.loads(files[path]), normalized="Normalize" in kinds)


def _find_module_kind(name: str) -> str:
    """Return the class of a module, of one from elsewhere with its package."""
    if name.startswith(_MODULE_PACKAGE):
        return name.rpartition(".")[2]
    return name


def _read_pooling_config(path: str, config: Mapping[str, Any], *, normalized: bool) -> Pooling:
    """**Raises** `ValueError` for a key or a mode that is not covered."""
    sizes = [config[key] for key in ("word_embedding_dimension", "embedding_dimension") if key in config]
    known = {*_MODE_KEYS, "pooling_mode", "word_embedding_dimension", "embedding_dimension", "include_prompt"}
    if unknown := [key for key in config if key not in known]:
        raise ValueError(f"{path} has the key {unknown[0]}, which is not covered: pass pooling=")
    if not config.get("include_prompt", True):
        raise ValueError(f"{path} leaves prompts out (include_prompt), which is not covered: pass pooling=")
    switched_on = [mode for key, mode in _MODE_KEYS.items() if config.get(key)] or ["mean"]
    named = config.get("pooling_mode", switched_on)
    if isinstance(named, str):
        modes = (named,)
    elif isinstance(named, list):
        modes = tuple(named)
    else:
        modes = ()
    if not modes or not all(mode in list(POOLINGS) for mode in modes):
        raise ValueError(f"{path} has pooling_mode = {named!r}, and known are {', '.join(POOLINGS)}: pass pooling=")
    size = sizes[0] if sizes else None
    return Pooling(modes, normalized, size)
