"""Blenderbot 90M (Roller et al., arXiv:2004.13637): BART without unused positions. The decoder normalizes the
embeddings of tokens before positions are added."""

import dataclasses

from jaxtyping import Array, Key

from zoo.layers import LayerNorm
from zoo.models.hf import grammar as hf

from . import bart
from .bart_layers import NormProjection

_WIRING = bart.Wiring(positions=0, embedding_norm=True)


def _build_blenderbot_small(config: hf.Config, *, key: Key[Array, ""]) -> hf.EncoderDecoder:
    model = bart.build_bart(config, _WIRING, key=key)
    # transformers normalizes tokens before they are scaled: the same norm after it has a scaled epsilon.
    epsilon = 1e-5 * model.decoder.embedding.multiplier**2
    norm = NormProjection(LayerNorm(config["hidden_size"], epsilon=epsilon))
    decoder = dataclasses.replace(model.decoder, embedding_projection=norm, embedding_norm=None)
    return dataclasses.replace(model, decoder=decoder)


def _map_blenderbot_small_names(config: hf.Config) -> hf.NameMap:
    names = bart.map_bart_names(config, _WIRING)
    return {**names, "model.decoder.layernorm_embedding": "decoder.embedding_projection.norm"}


BLENDERBOT_SMALL = bart.make_bart_family(
    "blenderbot-small",
    "BlenderbotSmallForConditionalGeneration",
    _WIRING,
    {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "decoder_ffn_dim": 2048,
        "decoder_layers": 8,
        "max_position_embeddings": 512,
        "decoder_start_token_id": hf.optional_non_negative(1),
    },
    build=_build_blenderbot_small,
    names=_map_blenderbot_small_names,
)
