"""Trained projections of a student's hidden states, to be compared with a teacher's."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.layers import Linear
from zoo.models.capture import capture
from zoo.models.decoder import Decoder
from zoo.parallel import Dim, Module, gather
from zoo.parallel.tokens import replicate_tokens


class HiddenProjections(Module):
    """One linear map for each pair of layers, from the width of the student to the width of the teacher.

    Hints of FitNets (Romero et al., arXiv:1412.6550) on several layers, as in TinyBERT (Jiao et al.,
    arXiv:1909.10351).
    """

    linears: tuple[Linear, ...]

    pairs: tuple[tuple[int, int], ...] = eqx.field(static=True)
    """Layer of the student and layer of the teacher, counted from 0."""

    def __init__(self, student: Decoder, teacher: Decoder, pairs: Sequence[str], *, key: Key[Array, ""]):
        """- `pairs`: the layer of the student and the layer of the teacher, counted from 0: "4:12".

        **Raises** `ValueError` for anything but pairs of layers that both models have.
        """
        if not pairs:
            raise ValueError('expected pairs of layers, such as "4:12", got none')
        self.pairs = tuple(map(_parse_pair, pairs))
        widths = [_find_widths(model, names) for model, names in zip((student, teacher), self.names, strict=True)]
        keys = jax.random.split(key, len(self.pairs))
        self.linears = tuple(map(_make_linear, *widths, keys))

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """Names of the student's and the teacher's values, for `zoo.capture`."""
        return [f"layers.{layer}" for layer, _ in self.pairs], [f"layers.{layer}" for _, layer in self.pairs]

    def __call__(
        self, student_values: Sequence[Float[Array, "batch _ _"]], teacher_values: Sequence[Float[Array, "batch _ _"]]
    ) -> Float[Array, "batch seq"]:
        """Compute the mean squared error of the projected values, over features and pairs, in float32."""
        pairs = zip(gather(self).linears, student_values, teacher_values, strict=True)
        return jnp.stack([_compute_error(*pair) for pair in pairs]).mean(0)


def _make_linear(width: int, teacher_width: int, key: Key[Array, ""]) -> Linear:
    # The result is not a residual stream, whose tokens might be reduce-scattered.
    return Linear(width, teacher_width, in_=Dim("embed"), out=Dim("latent"), key=key)


def _compute_error(
    linear: Linear, x: Float[Array, "batch _ _"], y: Float[Array, "batch _ _"]
) -> Float[Array, "batch seq"]:
    projected = linear(replicate_tokens(x)).astype(jnp.float32)
    return ((projected - replicate_tokens(y).astype(jnp.float32)) ** 2).mean(-1)


def _parse_pair(pair: str) -> tuple[int, int]:
    own, colon, other = pair.partition(":")
    if not colon or not own.isdecimal() or not other.isdecimal():
        raise ValueError(f'{pair!r}: expected a layer of the student and one of the teacher, such as "4:12"')
    return int(own), int(other)


def _find_widths(model: Decoder, names: Sequence[str]) -> list[int]:
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    _, values = eqx.filter_eval_shape(capture(model, *names), tokens)
    return [values[name].shape[-1] for name in names]
