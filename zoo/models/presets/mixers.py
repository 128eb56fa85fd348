"""Mixers of a Transformer: its own attention, in a pattern of sliding windows, or another mixer."""

from collections.abc import Callable, Sequence
from functools import partial

from zoo.layers import AbstractMixer, Attention, RMSNorm
from zoo.layers.linear import resolve_head_dim
from zoo.ops.rotary import Rotary
from zoo.parallel import Dim

from ..build import MixerFactory
from ..factories import bind_factory


def make_mixer_pattern(
    mixer: Callable[..., AbstractMixer] | None,
    embed: int,
    heads: int,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rotary: Rotary | None = None,
    qk_norm: bool = False,
    windows: Sequence[int | None] = (None,),
    soft_cap: float | None = None,
    implementation: str | Callable,
    out_scale: float,
) -> list[MixerFactory]:
    """Return the mixer factories that repeat over the layers: `mixer` if it is given, else `Attention` of each window.

    **Raises** `ValueError` for an option of `Attention` together with a `mixer`, and for two numbers of heads.
    """
    if mixer is not None:
        given = {
            "kv_heads": kv_heads is not None,
            "head_dim": head_dim is not None,
            "rotary": rotary is not None,
            "qk_norm": qk_norm,
            "windows": tuple(windows) != (None,),
            "soft_cap": soft_cap is not None,
            "implementation": implementation != "auto",
        }
        if name := next((name for name, is_given in given.items() if is_given), None):
            raise ValueError(f"{name} is an option of Attention, and a mixer was given: say it to the mixer")
        own_heads = getattr(mixer, "keywords", {}).get("heads", heads)
        if own_heads != heads:
            raise ValueError(f"heads={heads}, and the mixer was given heads={own_heads}: give one number")
        return [bind_factory("mixer", mixer, embed, heads=heads, out_scale=out_scale)]
    head_dim = resolve_head_dim(embed, heads, head_dim)
    if rotary is None:
        rotary = Rotary(head_dim)
    head_norm = None
    if qk_norm:
        head_norm = partial(RMSNorm, head_dim, features=Dim("head_dim"))
    attention = partial(
        Attention,
        embed,
        heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=rotary,
        qk_norm=head_norm,
        soft_cap=soft_cap,
        implementation=implementation,
        out_scale=out_scale,
    )
    by_window = {window: partial(attention, window=window) for window in windows}
    return [by_window[window] for window in windows]
