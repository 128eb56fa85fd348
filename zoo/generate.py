"""Text out of a model: one token after another, with a cache."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.layers import Info
from zoo.models import Decoder, Stack, swap_stack


def generate(
    model: Decoder,
    tokens: Int[Array, "batch seq"],
    *,
    max_new_tokens: int,
    mask: Bool[Array, "batch seq"] | None = None,
    temperature: float = 0.0,
    key: Key[Array, ""] | None = None,
) -> Int[Array, "batch new"]:
    """The tokens that follow a prompt: the new ones only.

    - `mask`: True where the prompt is real; prompts of unlike length are padded on the left.
    - `temperature`: 0 takes the likeliest token; otherwise tokens are drawn from softmax(logits / temperature) with
      `key`.

    The prompt runs through the scanned layers at once; then the layers run one by one, each with a cache of its own.
    Compiled once a shape of prompt and number of new tokens.

    **Raises** `ValueError` for an empty prompt, padding on the right, a temperature below 0, or one above 0 without a
    key.
    """
    if max_new_tokens < 1 or tokens.shape[1] < 1:
        raise ValueError(
            f"generate needs a prompt and max_new_tokens of at least 1: {tokens.shape=}, {max_new_tokens=}"
        )
    if temperature < 0 or (temperature > 0 and key is None):
        raise ValueError(f"temperature={temperature} needs to be 0, or above 0 with a key to draw with")
    if mask is not None and not isinstance(mask, Tracer) and not bool(mask[:, -1].all()):
        raise ValueError("prompts are padded on the left: the last token of every row has to be real")
    mask = jnp.ones(tokens.shape, bool) if mask is None else mask
    return decode(model, tokens, mask, max_new_tokens, jnp.float32(temperature), key if temperature else None)


@eqx.filter_jit
def decode(
    model: Decoder,
    tokens: Int[Array, "batch seq"],
    mask: Bool[Array, "batch seq"],
    new: int,
    temperature: Float[Array, ""],
    key: Key[Array, ""] | None,
) -> Int[Array, "batch new"]:
    positions = jnp.where(mask, jnp.cumsum(mask, axis=1) - 1, -1)
    states = model.init_state(tokens.shape[0], tokens.shape[1] + new)
    stream, states = model.hidden(tokens, Info(positions), states)
    one_by_one = swap_stack(model, Stack.unstacked)

    def choose(x, step):
        logits = model.logits(x).astype(jnp.float32)
        if key is None:
            return logits.argmax(-1)
        return jax.random.categorical(jax.random.fold_in(key, step), logits / temperature)

    def step(carry, number):
        token, position, states = carry
        stream, states = one_by_one.hidden(token[:, None], Info(position[:, None]), states)
        token = choose(stream.x[:, 0], number)
        return (token, position + 1, states), token

    first = choose(stream.x[:, -1], 0)
    carry = first, positions[:, -1] + 1, states
    _, rest = lax.scan(step, carry, jnp.arange(1, new))
    return jnp.concatenate([first[:, None], rest.T], axis=1)
