"""Blenderbot (Roller et al., arXiv:2004.13637): mBART without a norm of the embeddings and without unused positions."""

from zoo.models.hf import grammar as hf

from . import bart

BLENDERBOT = bart.make_bart_family(
    "blenderbot",
    "BlenderbotForConditionalGeneration",
    bart.Wiring(positions=0, norm_first=True),
    {
        "vocab_size": 8008,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "decoder_ffn_dim": 10240,
        "decoder_layers": 24,
        "decoder_attention_heads": 32,
        "max_position_embeddings": 128,
        "decoder_start_token_id": hf.optional_non_negative(1),
    },
)
