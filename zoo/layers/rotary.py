"""RoPE in mixers: cos and sin at the positions of tokens, for scalings that may depend on the sequence length, and at
the coordinates of patches."""

from jax import lax
from jaxtyping import Array, Float, Int

from zoo.ops.axial_rotary import AxialRotary, apply_axial_rotary
from zoo.ops.rotary import DynamicScaling, LongRopeScaling, ReversedRotation, RopeScaling, Rotary, apply_rotary
from zoo.ops.sectioned_rotary import SectionedRotary
from zoo.parallel import num_shards, reduce
from zoo.shapes import HeadVectors, HiddenStates

from .token_info import TokenInfo, token_positions

_Angles = Float[Array, "*batch seq pairs"]


def compute_cos_sin(
    rotary: Rotary | AxialRotary, x: HiddenStates, info: TokenInfo, length: int | Int[Array, ""] | None = None
) -> tuple[_Angles, _Angles]:
    """Return cos and sin of the RoPE angles of each token.

    A length-dependent scaling uses `length`, the `rope_length` of the KV cache, or else the length of the longest row.

    **Raises** `ValueError` for an `AxialRotary` and tokens without coordinates.
    """
    if isinstance(rotary, AxialRotary):
        if info.coordinates is None:
            raise ValueError("two-dimensional RoPE needs the coordinates of patches, which zoo.models.ImageEncoder has")
        return rotary(info.coordinates)
    if isinstance(rotary, SectionedRotary) and info.coordinates is not None:
        return rotary.turn_on_axes(info.coordinates)
    if length is None and find_length_dependent_scaling(rotary) is not None:
        return rotary(token_positions(x, info), length=find_max_row_length(x, info))
    return rotary(token_positions(x, info), length=length)


def rotate_heads(x: HeadVectors, rotary: Rotary | AxialRotary, cos: _Angles, sin: _Angles) -> HeadVectors:
    """Rotate queries or keys by the angles of `compute_cos_sin`."""
    if isinstance(rotary, AxialRotary):
        return apply_axial_rotary(x, cos, sin, halves=rotary.halves)
    return apply_rotary(x, cos, sin, interleaved=rotary.interleaved)


def find_length_dependent_scaling(
    rotary: Rotary | AxialRotary | None,
) -> DynamicScaling | LongRopeScaling | None:
    """Return the RoPE scaling with frequencies that depend on the sequence length; None if there is none."""
    if not isinstance(rotary, Rotary):
        return None
    scaling: RopeScaling | None = rotary.scaling
    if isinstance(scaling, ReversedRotation):
        scaling = scaling.scaling
    if isinstance(scaling, DynamicScaling | LongRopeScaling):
        return scaling
    return None


def rope_switch_length(rotary: Rotary | AxialRotary | None) -> int | None:
    """Return the length beyond which RoPE has other frequencies for all tokens; None if there is none.

    Dynamic NTK has none: its frequencies change a little with each token, and a cache keeps the keys of earlier ones.
    """
    scaling = find_length_dependent_scaling(rotary)
    if isinstance(scaling, LongRopeScaling):
        return scaling.original_length
    return None


def find_max_row_length(x: HiddenStates, info: TokenInfo) -> int | Int[Array, ""]:
    """Length of the longest row over all devices."""
    if info.positions is None:
        return x.shape[1] * num_shards(x, "seq")
    longest = reduce(info.positions.max() + 1, over="batch", by=lax.pmax)
    return reduce(longest, over="seq", by=lax.pmax)
