"""PEGASUS (Zhang et al., arXiv:1912.08777): BART with norms before the sublayers, sinusoidal positions, and no norm of
the embeddings."""

from zoo.layers.embedding import SinusoidalPositionEmbedding
from zoo.models.hf import grammar as hf

from . import bart


def make_positions(config: hf.Config) -> SinusoidalPositionEmbedding:
    """Make the positions of PEGASUS and Marian."""
    return bart.make_sinusoids(config, steps=config["hidden_size"] // 2)


PEGASUS = bart.make_bart_family(
    "pegasus",
    "PegasusForConditionalGeneration",
    bart.Wiring(positions=make_positions, norm_first=True),
    {"decoder_start_token_id": hf.optional_non_negative(0)},
)
