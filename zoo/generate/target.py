"""Read a source for `zoo.generate`: a prefix without tokens, whose states hold the keys and values of the source."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from zoo._checks import is_host_readable
from zoo.layers import TokenInfo
from zoo.models.decoder import LayerStates
from zoo.models.encoder_decoder import EncoderDecoder
from zoo.parallel import Mesh, vary
from zoo.parallel.collectives import current_mesh, vary_as_returned
from zoo.parallel.spmd import run_jitted

from .buckets import choose_cache_length, choose_rows, round_up
from .prefill import Prefix, on_mesh


def read_source(
    model: EncoderDecoder,
    source: Array,
    mask: Bool[Array, "batch _"] | None,
    *,
    new: int,
    length: int | None,
    samples: int,
    mesh: Mesh | None,
) -> tuple[Any, Prefix]:
    """Return the tokens that each target begins with, "batch start", and the prefix that they follow: no tokens, and
    the states of the decoder before them.

    Tokens of a source are padded on the right to a bucket, and their rows as those of a prompt, so that few programs
    are compiled.

    **Raises** `ValueError` and `TypeError` for a source that the encoder does not read, a model without `start`, and
    targets that are longer than `length` or than there are learned positions.
    """
    model.check_source(source, mask)
    if not model.start:
        raise ValueError("start is empty: say what targets begin with, dataclasses.replace(model, start=(language,))")
    slots = choose_cache_length(model.decoder, len(model.start), new, length)
    rows = choose_rows(model.decoder, len(source), mesh, samples)
    batch = _pad_source(model, source, mask, rows, 1 if mesh is None else mesh.count_shards("seq"))
    states = run_jitted(on_mesh(_read_states, mesh), (model,), (batch, slots))
    text = jax.device_put(np.full((rows, slots), -1, np.int32))
    start = np.tile(np.asarray(model.start, np.int32), (len(source), 1))
    return start, Prefix(states, text, len(source), slots, length or 0)


def _read_states(model: EncoderDecoder, batch: dict[str, Array], length: int) -> LayerStates:
    source = model.encode(batch[model.source_key], mask=batch.get("source_mask"))
    states = model.init_state(source, length)
    if (mesh := current_mesh()) is None:
        return states
    # The empty states of a device become its shards of arrays: they have to vary as the states that follow them.
    padding = vary(jnp.full((len(source.x), 1), -1, jnp.int32), mesh.axes("batch"))

    def read(states: LayerStates) -> LayerStates | None:
        return model.decoder.hidden(jnp.zeros_like(padding), TokenInfo(padding), states)[1]

    return vary_as_returned(read, states)


def _pad_source(
    model: EncoderDecoder, source: Array, mask: Bool[Array, "batch _"] | None, rows: int, shards: int
) -> dict[str, Array]:
    """Return the source with copies of its last row up to `rows`, and of tokens, whose number varies, with padding up
    to a bucket that `shards` divides, and a mask."""
    row = np.minimum(np.arange(rows), len(source) - 1)
    # With NumPy if possible, so that nothing compiles for each shape of a source.
    on_host = is_host_readable(source) and (mask is None or is_host_readable(mask))
    xp: Any = np if on_host else jnp
    given: Any = (source, mask)
    if on_host:
        given = jax.device_get(given)
    source, mask = given
    if not model.reads_tokens:
        return {model.source_key: xp.asarray(source)[row]}
    count = source.shape[1]
    is_real = xp.ones(source.shape, bool) if mask is None else xp.asarray(mask).astype(bool)
    pad = (0, 0), (0, -(-round_up(count) // shards) * shards - count)
    ids = xp.where(is_real, source, 0)  # padding may be any id, and an unknown one is NaN
    padded = {model.source_key: xp.pad(ids, pad)[row].astype(np.int32), "source_mask": xp.pad(is_real, pad)[row]}
    return jax.device_put(padded)
