"""From log-mel features of audio to hidden states: Whisper's encoder, on the blocks and the stack of decoders."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo._checks import describe_argument, wrap_key
from zoo.layers import AbstractNorm, Dropout, TokenInfo
from zoo.layers.encoders.frames import AudioEmbedding
from zoo.layers.token_info import split_row_keys
from zoo.parallel import Module, gather
from zoo.parallel.tokens import replicate_tokens, shard_tokens

from ..build import LayerFactories, build_stack
from ..decoder import EMBEDDING_DROPOUT_SITE, AbstractStack, Block, Hidden
from ..torch_habits import explain_torch_habit, hash_for_jit

Features = Float[Array, "batch bands frames"]


class AudioEncoder(Module):
    """An encoder of audio: norm(stack(embedding(features))) (Whisper, Radford et al., arXiv:2212.04356, section 2.2).

    Features are of a window of fixed length, 30 s in the published models: `zoo.audio.log_mel_features` makes them.
    """

    embedding: AudioEmbedding
    stack: AbstractStack
    norm: AbstractNorm
    dropout: Dropout

    if not TYPE_CHECKING:  # for a type checker every name would be an attribute
        __getattr__ = explain_torch_habit

    def __hash__(self) -> int:
        return hash_for_jit(self)

    def check_inputs(self, features: Any, mask: Any = None) -> None:
        """**Raises** `TypeError` for features that are not floating point; `ValueError` for other bands than the model
        reads, for a longer or a shorter window, and for a mask: silence after the end is read, too."""
        if mask is not None:
            raise ValueError("mask: a window of audio is read as a whole, with the silence after its end: leave it out")
        if not hasattr(features, "dtype") or not jnp.issubdtype(features.dtype, jnp.floating):
            raise TypeError(f"features: expected log-mel features, got {describe_argument(features)}")
        expected = (self.embedding.bands, self.embedding.num_frames)
        if features.ndim != 3 or features.shape[1:] != expected:
            raise ValueError(
                f'features: expected "batch bands frames" of {expected[0]} bands and {expected[1]:,} frames, the whole '
                f"window, got {features.shape}: cut audio into windows, and zoo.audio.log_mel_features pads the last"
            )

    def token_info(self, features: Features, *, key: Key[Array, "..."] | None = None) -> TokenInfo:
        """Return one PRNG key per row."""
        return TokenInfo(keys=split_row_keys(key, len(features)))

    def hidden(self, features: Features, info: TokenInfo) -> tuple[Hidden, None]:
        """Return the hidden states after the final norm, and None: there are no states."""
        hidden, _ = self.stack(self.embed(features, info), info)
        return Hidden(replicate_tokens(gather(self.norm)(hidden.x))), None

    def embed(self, features: Features, info: TokenInfo) -> Hidden:
        """Return the input of the first layer."""
        x = shard_tokens(gather(self.embedding)(features))
        return Hidden(self.dropout(x, info, site=EMBEDDING_DROPOUT_SITE))


def build_audio_encoder(
    *,
    embedding: Callable[..., AudioEmbedding],
    layers: Sequence[LayerFactories],
    norm: Callable[[], AbstractNorm],
    dropout: float = 0.0,
    key: Key[Array, ""],
) -> AudioEncoder:
    """Build an encoder of audio from factories of its parts, as `zoo.models.build_encoder` builds one of texts."""
    embedding_key, stack_key = jax.random.split(wrap_key(key))
    options = {"block": Block, "dropout": dropout, "remat": "none", "loop": "auto"}
    stack = build_stack(layers, norm, **options, key=stack_key)
    return AudioEncoder(embedding(key=embedding_key), stack, norm(), Dropout(dropout))
