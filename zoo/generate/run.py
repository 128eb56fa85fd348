"""`zoo.generate`."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, Key

from zoo.models import Decoder
from zoo.parallel import Mesh, place

from . import request
from .decode import DecodeState, decode_until, prefill, run_program, unstack_layers

_Number = float | int


def generate(
    model: Decoder,
    tokens: Int[Array, "batch seq"],
    *,
    max_new_tokens: int,
    mask: Bool[Array, "batch seq"] | None = None,
    temperature: _Number = 0.0,
    top_k: int | None = None,
    top_p: _Number | None = None,
    min_p: _Number | None = None,
    repetition_penalty: _Number | None = None,
    stop_tokens: Sequence[int] = (),
    length: int | None = None,
    mesh: Mesh | None = None,
    callback: Callable[[Int[np.ndarray, "batch"]], object] | None = None,
    key: Key[Array, ""] | None = None,
) -> Int[Array, "batch new"]:
    """The tokens that follow a prompt: the new ones only, `max_new_tokens` a row.

    - `mask`: True where the prompt is real; prompts of unlike length are padded on the left.
    - `temperature`: 0 takes the likeliest token; otherwise tokens are drawn from softmax(logits / temperature) with
      `key`. A row's randomness is its own: neither the mesh nor the other rows matter.
    - `top_k`, `top_p`, `min_p`: what may be drawn, in this order; see `zoo.ops.sampling.truncate`.
    - `repetition_penalty`: of tokens that are in the prompt or came since; see `zoo.ops.sampling.penalize`.
    - `stop_tokens`: a row ends with the first of these, which is itself given. After it comes -1: no token.
    - `length`: how many tokens the cache is to hold, prompt and new ones. Unless given, their sum rounded up to a power
      of two, where the model can hold so many. Rotary embeddings that depend on the length of a text (`Dynamic`,
      `LongRope`) are those of this length.
    - `mesh`: where the model was placed. Rows are split over its batch axes, heads and vocabulary over `tensor`.
    - `callback`: called with the newest token of each row as soon as they are known, -1 for rows that have ended.

    The prompt runs through the scanned layers at once; then the layers run one by one, each with a cache of its own, in
    one loop that ends when every row has. Nothing waits for the device, so that `generate` can stand in a function
    under `jit`; a callback does wait, once a token.

    Prompts are padded to powers of two from 16 on, so a prompt's length and the number of new tokens compile nothing
    new; another `length`, another number of rows, and whether an option is given do. All layers are copied out of
    their stack at every call: for many short ones pass `swap_stack(model, Stack.unstacked)`, which is taken as it is.

    **Raises** `ValueError` for an empty prompt, one with padding on the right, with a row without a real token or with
    an id outside the vocabulary; for a number out of its range; for a temperature above 0 without a key, options of
    drawing with a temperature of 0, a stop token outside the vocabulary, a `length` below prompt and new tokens, a
    callback under `jit`; and what `model.init_state` raises where a model cannot hold as many.
    `NotImplementedError` for a mesh that splits layers or the sequence.
    """
    vocab, _ = model.embedding.table_shape
    request.check_sampling_options(
        max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, key is not None
    )
    request.check_prompt(tokens, mask, vocab)
    request.check_mesh(mesh)
    if callback is not None and any(isinstance(x, Tracer) for x in jax.tree.leaves((model, tokens, mask, key))):
        raise ValueError("a callback needs tokens as they come, and under jit there are none yet: call generate bare")
    options = request.SamplingOptions.from_arguments(
        temperature, top_k, top_p, min_p, repetition_penalty, stop_tokens, vocab
    )
    options = options if mesh is None else place(options, mesh)  # once, not at every step
    length = request.choose_cache_length(model, tokens.shape[1], max_new_tokens, length)
    prompt, positions, rows = request.pad_prompt(tokens, mask, length, mesh)

    state = run_program(prefill, mesh, (model, options, key if temperature else None), prompt, positions, rows, length)
    if max_new_tokens > 1:
        model = unstack_layers(model, mesh)
    if callback is not None:
        state = _decode_with_callback(callback, mesh, (model, options), state, len(tokens), max_new_tokens)
    elif max_new_tokens > 1:
        state = run_program(decode_until, mesh, (model, options), state, jnp.int32(max_new_tokens), donate=True)
    return state.tokens[: len(tokens), :max_new_tokens]


def _decode_with_callback(
    callback: Callable,
    mesh: Mesh | None,
    fixed: tuple[Decoder, request.SamplingOptions],
    state: DecodeState,
    rows: int,
    max_new_tokens: int,
) -> DecodeState:
    """The same program, asked for one token after another."""
    for count in range(1, max_new_tokens + 1):
        if count > 1:
            state = run_program(decode_until, mesh, fixed, state, jnp.int32(count), donate=True)
        newest, running = jax.device_get((state.newest, state.running))
        callback(np.array(newest[:rows]))
        if not running:
            break
    return state
