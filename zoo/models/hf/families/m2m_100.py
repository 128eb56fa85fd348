"""M2M-100 (Fan et al., arXiv:2010.11125) and NLLB (arXiv:2207.04672): mBART with sinusoidal positions, without a
norm of the embeddings and without a bias of the logits."""

from zoo.layers.embedding import SinusoidalPositionEmbedding
from zoo.models.hf import grammar as hf

from . import bart


def _make_positions(config: hf.Config) -> SinusoidalPositionEmbedding:
    """Make positions that count from the one after `pad_token_id`, which is the position of padding.

    **Raises** `ConfigError` for targets that begin with padding, whose position would not count.
    """
    padding = config["pad_token_id"]
    if padding in hf.read_start(config):
        raise hf.ConfigError(f"pad_token_id = {padding}, and targets begin with it: positions count other tokens only")
    return bart.make_sinusoids(config, offset=padding + 1)


M2M_100 = bart.make_bart_family(
    "m2m_100",
    "M2M100ForConditionalGeneration",
    bart.Wiring(positions=_make_positions, norm_first=True, logits_bias=False),
    {
        "vocab_size": 128112,
        "hidden_act": "relu",
        "scale_embedding": True,
        "pad_token_id": hf.non_negative(1),
        "decoder_start_token_id": hf.optional_non_negative(2),
    },
)
