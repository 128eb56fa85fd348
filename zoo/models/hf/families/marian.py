"""Marian (Junczys-Dowmunt et al., arXiv:1804.00344): BART with sinusoidal positions, and no norm of the embeddings."""

from zoo.layers.embedding import SinusoidalPositionEmbedding
from zoo.models.hf import grammar as hf

from . import bart, pegasus


def _make_positions(config: hf.Config) -> SinusoidalPositionEmbedding:
    """Make the positions. **Raises** `ConfigError` for a decoder with another vocabulary."""
    vocab = config["decoder_vocab_size"]
    if vocab not in (None, config["vocab_size"]):
        raise hf.ConfigError(f"decoder_vocab_size = {vocab}: only models of one vocabulary are read")
    return pegasus.make_positions(config)


MARIAN = bart.make_bart_family(
    "marian",
    "MarianMTModel",
    bart.Wiring(positions=_make_positions),
    {
        "vocab_size": 58101,
        "decoder_vocab_size": hf.optional_count(),
        "decoder_start_token_id": hf.optional_non_negative(58100),
    },
    required_values={"share_encoder_decoder_embeddings": (True,), **bart.REQUIRED_VALUES},
)
