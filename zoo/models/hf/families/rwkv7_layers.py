"""The layer of RWKV-7: time mixing and channel mixing, and the values of the first layer, which later layers read."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from zoo.layers import RWKV7, AbstractMixer, AbstractNorm, Dropout, TokenInfo
from zoo.layers.abstract import run_mixer
from zoo.models.decoder import AbstractBlock, AbstractLayerInputs, Hidden
from zoo.parallel import named_by_class
from zoo.parallel.tokens import run_on_all_tokens
from zoo.shapes import ResidualStream, Tokens, Values


class FirstValueHidden(Hidden):
    """Hidden states with the values of the first layer."""

    constant_fields = ("first_value",)

    first_value: Values | None = None


class FirstValueInputs(AbstractLayerInputs):
    """Make room for the values of the first layer, which has a segment of its own."""

    def __call__(self, tokens: Tokens, x: ResidualStream) -> FirstValueHidden:
        return FirstValueHidden(x)


class FirstValueBlock(AbstractBlock):
    """x + mixer(norm(x)), then x + ffn(norm(x)), of RWKV-7 and its channel mixing (arXiv:2503.14456, section 4). The
    first layer hands its values on, and may begin with a norm of x. The state is a pair, one of each mixer."""

    pre_norm: AbstractNorm | None
    mixer_norm: AbstractNorm
    mixer: RWKV7 = named_by_class()
    ffn_norm: AbstractNorm
    ffn: AbstractMixer = named_by_class()
    dropout: Dropout

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> tuple[Any, Any]:
        return self.mixer.init_state(batch, length, dtype), self.ffn.init_state(batch, length, dtype)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        """**Raises** `TypeError` for hidden states without room for the values of the first layer."""
        if not isinstance(hidden, FirstValueHidden):
            raise TypeError(
                f"this layer reads or writes the values of the first layer, which {type(hidden).__name__} has not: run "
                "the layers in their model"
            )
        if self.pre_norm is not None:
            hidden = hidden.normalize(self.pre_norm)
        mixer_state, ffn_state = (None, None) if state is None else state
        normed = self.mixer_norm(hidden.x)
        mixed, others = run_on_all_tokens(self.mixer.mix, normed, info, mixer_state, hidden.first_value)
        mixer_state, first_value = others
        mixed = self.dropout(checkpoint_name(mixed, "mixer_output"), info, site=0)
        hidden = dataclasses.replace(hidden, x=hidden.x + mixed, first_value=first_value)
        fed, ffn_state = run_mixer(self.ffn, self.ffn_norm(hidden.x), info, ffn_state)
        hidden = hidden.add_residual(self.dropout(fed, info, site=1))
        return hidden, None if state is None else (mixer_state, ffn_state)
