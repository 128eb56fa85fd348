"""Read a prompt with images for `zoo.generate`: a prefix that has read all of it, and says so."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from zoo.layers import TokenInfo
from zoo.layers.kv_cache import set_rope_length
from zoo.models.decoder import LayerStates
from zoo.models.image_text import ImageText
from zoo.parallel import Mesh, reduce
from zoo.parallel.spmd import run_jitted

from . import request
from .buckets import Prompt, choose_cache_length, choose_rows, pad_prompt, round_up
from .prefill import Prefix, on_mesh, write_text


def read_images(
    model: ImageText,
    tokens: Int[Array, "batch seq"],
    images: Any,
    mask: Bool[Array, "batch seq"] | None,
    *,
    new: int,
    length: int | None,
    samples: int,
    mesh: Mesh | None,
) -> tuple[Int[Array, "batch 1"], Prefix]:
    """Return the last token of each row, and the prefix of those before it. The prompt is read in one piece, since
    tokens of an image may attend to later ones, and with its last token, which may be one of an image.

    **Raises** `ValueError` and `TypeError` for a prompt that `zoo.generate` would refuse.
    """
    request.check_prompt(tokens, mask, model.decoder.embedding.table_shape[0])
    slots = choose_cache_length(model.decoder, tokens.shape[1], new, length)
    rows = choose_rows(model, len(tokens), mesh, samples)
    prompt = pad_prompt(tokens, mask, rows, round_up(tokens.shape[1]), mesh, length or 0)
    index = np.minimum(np.arange(rows), len(tokens) - 1)
    images = jax.tree.map(lambda x: jnp.asarray(x)[index], images)
    states, text, last = run_jitted(on_mesh(_read_prompt, mesh), (model,), (prompt, {"images": images}, slots))
    return tokens[:, -1:], Prefix(states, text, len(tokens), slots, length or 0, followed=last)


def _read_prompt(
    model: ImageText, prompt: Prompt, batch: dict[str, Any], length: int
) -> tuple[LayerStates, Int[Array, "batch text"], Float[Array, "batch embed"]]:
    tokens = jnp.concatenate([prompt.tokens, prompt.last[:, None]], axis=1)
    positions = jnp.concatenate([prompt.positions, prompt.last_position[:, None]], axis=1)
    info = model.place_images(tokens, batch["images"], TokenInfo(positions))
    count = reduce(prompt.last_position.max() + 1, over="batch", by=lax.pmax)
    rope_length = jnp.where(prompt.rope_length > 0, prompt.rope_length, count)
    states = set_rope_length(model.decoder.init_state(len(tokens), length), rope_length)
    hidden, states = model.read(batch["images"]).hidden(tokens, info, states)
    is_last = jnp.arange(length) == prompt.last_position[:, None]
    return states or (), jnp.where(is_last, -1, write_text(prompt, length)), hidden.x[:, -1]
