"""BART (Lewis et al., arXiv:1910.13461): the original Transformer with GELU, learned positions after two unused rows, a
norm of the embeddings, and a bias of the logits that is not trained."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Key

from zoo.layers import IdentityNorm, LayerNorm
from zoo.layers.embedding import SinusoidalPositionEmbedding
from zoo.models.hf import grammar as hf

from . import opt
from .bart_layers import BiasedEmbedding

BIASES: dict[str, Any] = {"bias": True, "out_bias": True}


@dataclasses.dataclass(frozen=True)
class Wiring:
    """Facts that distinguish a family of BART's line."""

    positions: int | Callable[[hf.Config], SinusoidalPositionEmbedding]
    """Unused rows before the learned positions, or a function that makes computed ones of a config."""
    norm_first: bool = False
    """The norms are before the sublayers, and after the last layer; else after the residual sums."""
    embedding_norm: bool = False
    logits_bias: bool = True


def build_bart(config: hf.Config, wiring: Wiring, *, key: Key[Array, ""]) -> hf.EncoderDecoder:
    """Build a model of BART's line."""
    embed = config["hidden_size"]
    encoder_key, decoder_key = jax.random.split(key)
    norm = partial(LayerNorm, embed)
    shell: dict[str, Any] = {
        "final_norm": norm if wiring.norm_first else IdentityNorm,
        "embedding_norm": norm if wiring.embedding_norm else None,
    }
    if isinstance(wiring.positions, int):
        shell |= {"positions": config["max_position_embeddings"], "position_offset": wiring.positions}
    else:
        shell["positions"] = wiring.positions(config)
    attention = hf.make_bidirectional_attention_factory(config, **BIASES)
    encoder = hf.build_source_encoder(
        config,
        [(attention, hf.make_mlp_factory(config))] * config["num_hidden_layers"],
        norm,
        block=hf.Block if wiring.norm_first else hf.AddNormBlock,
        key=encoder_key,
        **shell,
    )
    block = hf.CrossBlock if wiring.norm_first else hf.AddNormCrossBlock
    decoder = build_bart_decoder(config, block=block, key=decoder_key, **shell)
    if wiring.logits_bias:
        decoder = dataclasses.replace(decoder, embedding=BiasedEmbedding(decoder.embedding))
    return hf.join_encoder_decoder(config, encoder, decoder)


def build_bart_decoder(
    config: hf.Config, *, adapt: Callable[..., Any] = lambda make: make, key: Key[Array, ""], **options: Any
) -> hf.Decoder:
    """Build the decoder of a model of BART's line; `adapt` changes the factories of its attention."""
    own = hf.Config(
        config,
        num_hidden_layers=config["decoder_layers"],
        num_attention_heads=config["decoder_attention_heads"],
        intermediate_size=config["decoder_ffn_dim"],
        tie_word_embeddings=True,
    )
    attention = adapt(hf.make_attention_factory(own, rotary=None, **BIASES))
    return hf.build_target_decoder(
        own,
        [(attention, hf.make_mlp_factory(own))] * own["num_hidden_layers"],
        partial(LayerNorm, own["hidden_size"]),
        adapt(hf.make_cross_attention_factory(own, **BIASES)),
        multiplier=own["hidden_size"] ** 0.5 if own["scale_embedding"] else 1.0,
        key=key,
        **options,
    )


def make_sinusoids(config: hf.Config, **options: int) -> SinusoidalPositionEmbedding:
    """Make computed positions. **Raises** `ConfigError` for a width that cannot be halved."""
    try:
        return SinusoidalPositionEmbedding(config["hidden_size"], **options)
    except ValueError as error:
        raise hf.ConfigError(f"d_model = {config['hidden_size']}: {error}") from None


def map_bart_names(config: hf.Config, wiring: Wiring) -> hf.NameMap:
    """Map the tensors of a model of BART's line."""
    blocks: dict[str, hf.NameMap] = {
        "encoder": hf.prefixed("self_attn", "bidirectional_attention", opt.ATTENTION_NAMES),
        "decoder": {
            **hf.prefixed("encoder_attn", "cross_attention", opt.ATTENTION_NAMES),
            "encoder_attn_layer_norm": "cross_norm",
        },
    }
    shell = {}
    if isinstance(wiring.positions, int):
        shell["embed_positions"] = "position_embedding"
    if wiring.embedding_norm:
        shell["layernorm_embedding"] = "embedding_norm"
    if wiring.norm_first:
        shell["layer_norm"] = "norm"
    names: dict[str, Any] = {"model.shared": "decoder.embedding"}
    for stack, block in blocks.items():
        layers = hf.prefixed("layers.*", "layers.*", {**opt.BLOCK_NAMES, **block})
        names |= hf.prefixed(f"model.{stack}", stack, {**shell, **layers})
    if wiring.logits_bias:
        names["final_logits_bias"] = hf.TensorMapping(("decoder.embedding.bias",), leading_ones=1)
    return names


def _find_callers(config: hf.Config) -> dict[str, str]:
    return dict.fromkeys(("model.encoder.embed_tokens", "model.decoder.embed_tokens"), "model.shared")


ALIASES = {
    "d_model": "hidden_size",
    "encoder_ffn_dim": "intermediate_size",
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
    "activation_function": "hidden_act",
}
REQUIRED_VALUES: Mapping[str, tuple] = {"is_encoder_decoder": (True,), "tie_word_embeddings": (True,)}
_IGNORED_KEYS = """
    activation_dropout decoder_layerdrop dropout encoder_layerdrop init_std
    _num_labels add_bias_logits add_final_layer_norm classif_dropout do_blenderbot_90_layernorm extra_pos_embeddings
    force_bos_token_to_be_generated layernorm_variant normalize_before normalize_embedding output_past save_step
    static_position_embeddings
""".split()
"""The second line and the next ones are of older files, and transformers does not read them."""


def make_bart_family(
    name: str, architecture: str, wiring: Wiring, defaults: Mapping[str, Any], **facts: Any
) -> hf.Family:
    """Make a family of BART's line, with these defaults besides BART's, and further facts."""
    length = {"max_position_embeddings": 1024}
    learned = length if isinstance(wiring.positions, int) else {}
    return hf.Family(
        name=name,
        architecture=architecture,
        defaults={
            **hf.START_DEFAULTS,
            **learned,
            "vocab_size": 50265,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "decoder_ffn_dim": 4096,
            "decoder_layers": 12,
            "decoder_attention_heads": 16,
            "hidden_act": "gelu",
            "scale_embedding": False,
            **defaults,
        },
        aliases=ALIASES,
        **{
            "build": partial(build_bart, wiring=wiring),
            "names": partial(map_bart_names, wiring=wiring),
            "required_values": REQUIRED_VALUES,
            "ignored_keys": frozenset([*_IGNORED_KEYS, *(length.keys() - learned.keys())]),
            # of older files, and tables of positions that are computed
            "ignored_tensors": (r"^model\.\w+\.version$", r"^model\.\w+\.embed_positions\.weights?$"),
            "optional_tensors": (r"^final_logits_bias$",),
            "callers": _find_callers,
            "embedding": "model.shared",
            **facts,
        },
    )


BART = make_bart_family(
    "bart",
    "BartForConditionalGeneration",
    Wiring(positions=2, embedding_norm=True),
    {"decoder_start_token_id": hf.optional_non_negative(2)},
)
