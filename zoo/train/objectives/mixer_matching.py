"""Matching of mixers: recurrences learn to return what the attention layers of a trained model return."""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from zoo._checks import check_batch
from zoo.layers import AbstractMixer
from zoo.layers.token_info import batch_token_info
from zoo.models.capture import capture
from zoo.models.decoder import Decoder, find_checkable_vocab
from zoo.models.stack import Stack
from zoo.parallel import gather
from zoo.parallel.tokens import replicate_tokens

_NAME = "attention"
"""Name of the values of `zoo.layers.Attention` in a layer."""


class MixerMatch(NamedTuple):
    """Errors of mixers next to the attention layers of a teacher, in the order of the layers, in float32."""

    errors: Float[Array, "mixers batch seq"]
    """Mean squared difference of the outputs, over features."""
    powers: Float[Array, "mixers batch seq"]
    """Mean square of the teacher's output. `errors.sum() / powers.sum()` is the fraction that is not explained."""


def mixer_matching(mixers: Mapping[int, AbstractMixer], teacher: Decoder, batch: Mapping[str, Array]) -> MixerMatch:
    """Compare mixers with the attention layers of a teacher, each on the inputs that the teacher's layer has
    (the hidden-state alignment of MOHAWK, Bick et al., arXiv:2408.10189; attention transfer in LoLCATs, Zhang et al.,
    arXiv:2410.10254).

        found = train.objectives.mixer_matching(mixers, teacher, batch)
        return found.errors.sum(), batch["tokens"].size

    - `mixers`: by layer. Since no mixer sees what another returns, all layers are trained at once, and any of them can
      be put into the teacher afterwards (`zoo.models.replace_mixers`).
    - `batch`: as for `zoo.cross_entropy`, of which tokens, segments and positions are read.

    The teacher has no gradient. **Raises** `ValueError` for a layer without `zoo.layers.Attention`.
    """
    check_batch(batch, find_checkable_vocab(teacher))
    layers = teacher.stack.find_layers(_NAME) if isinstance(teacher.stack, Stack) else []
    if missing := [layer for layer in mixers if layer not in layers]:
        raise ValueError(f"layer {missing[0]} of the teacher has no Attention: its layers {layers} have")
    info = batch_token_info(batch, None)
    names = (f"layers.*.{_NAME}.input", f"layers.*.{_NAME}")
    _, values = capture(teacher.hidden, *names)(batch["tokens"], info)
    inputs, outputs = (lax.stop_gradient(jnp.asarray(values[name])) for name in names)
    errors = []
    powers = []
    for layer, mixer in sorted(mixers.items()):
        x = inputs[layers.index(layer)]
        expected = replicate_tokens(outputs[layers.index(layer)]).astype(jnp.float32)
        y, _ = gather(mixer)(x, info.mask_padding())
        errors.append(((replicate_tokens(y).astype(jnp.float32) - expected) ** 2).mean(-1))
        powers.append((expected**2).mean(-1))
    return MixerMatch(jnp.stack(errors), jnp.stack(powers))
