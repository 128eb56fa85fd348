"""T5 (Raffel et al., arXiv:1910.10683), v1.1 and FLAN-T5 (arXiv:2210.11416): encoder and decoder with learned biases of
relative position, which the layers of each share, RMSNorms before the sublayers, and scores that are not scaled."""

import dataclasses
from collections.abc import Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
from jaxtyping import Array, Key

from zoo.layers.attention.relative_bias import RelativeBias, RelativeBiasAttention
from zoo.models.hf import grammar as hf

_ACTIVATIONS = {"gelu": "gelu_pytorch_tanh"}
"""In the gated layers of T5's line "gelu" is the tanh approximation."""


def build_t5(
    config: hf.Config, *, tied: bool, scaled: bool, shares_bias: bool = True, key: Key[Array, ""]
) -> hf.EncoderDecoder:
    """Build a model of T5's line: with a head of its own unless `tied`, logits that are divided by sqrt(d_model) if
    `scaled`, and one table of biases for all layers of a stack if `shares_bias`."""
    encoder_key, decoder_key = jax.random.split(key)
    config = hf.Config(config, tie_word_embeddings=tied, hidden_act=_read_feed_forward(config)[0])
    deeper = hf.Config(config, num_hidden_layers=config["num_decoder_layers"] or config["num_hidden_layers"])
    norm = hf.make_rms_norm_factory(config)
    bias = partial(RelativeBias, config["relative_attention_num_buckets"], config["num_attention_heads"])
    if shares_bias:
        relative_bias = partial(hf.make_shared_module, 0)
        shared = [bias]
    else:
        relative_bias = bias
        shared = []

    def make_layers(config: hf.Config, *, causal: bool) -> list[hf.LayerFactories]:
        options = {"head_dim": config["head_dim"], "max_distance": config["relative_attention_max_distance"]}
        sizes = (config["hidden_size"], config["num_attention_heads"])
        mixer = partial(RelativeBiasAttention, *sizes, relative_bias, scale=1.0, causal=causal, **options)
        ffn = (
            hf.make_gated_mlp_factory(config)
            if _read_feed_forward(config)[1]
            else hf.make_mlp_factory(config, bias=False)
        )
        return [(mixer, ffn)] * config["num_hidden_layers"]

    return hf.join_encoder_decoder(
        config,
        hf.build_source_encoder(
            config,
            make_layers(config, causal=False),
            norm,
            block=hf.Block,
            final_norm=norm,
            shared=shared,
            key=encoder_key,
        ),
        hf.build_target_decoder(
            deeper,
            make_layers(deeper, causal=True),
            norm,
            hf.make_cross_attention_factory(deeper, scale=1.0),
            block=hf.CrossBlock,
            shared=shared,
            logits_multiplier=config["hidden_size"] ** -0.5 if scaled else 1.0,
            key=decoder_key,
        ),
    )


def _read_feed_forward(config: hf.Config) -> tuple[str, bool]:
    """Return the activation of the feed-forward layers, and True if they are gated."""
    word: str = config["feed_forward_proj"]
    gate, _, activation = word.rpartition("-")
    if gate not in ("", "gated"):
        raise hf.ConfigError(f"feed_forward_proj = {word!r}: expected an activation, or gated-one")
    if not gate:
        return activation, False
    return _ACTIVATIONS.get(activation, activation), True


def map_t5_stack(config: hf.Config, stack: str, ours: str, *, shares_bias: bool) -> dict[str, Any]:
    """Map the tensors of an encoder or a decoder, which is the module `ours` of the model."""
    attention = {"q": "query", "k": "key", "v": "value", "o": "out"}
    last = {"encoder": 1, "decoder": 2}[stack]
    block = {
        "layer.0.layer_norm": "mixer_norm",
        **hf.prefixed("layer.0.SelfAttention", "relative_bias_attention", attention),
        f"layer.{last}.layer_norm": "ffn_norm",
    }
    if _read_feed_forward(config)[1]:
        ffn = hf.prefixed("", "gated_mlp", {"wi_0": "gate", "wi_1": "up", "wo": "down"})
    else:
        ffn = hf.prefixed("", "mlp", {"wi": "up", "wo": "down"})
    block |= hf.prefixed(f"layer.{last}.DenseReluDense", "", ffn)
    if stack == "decoder":
        block["layer.1.layer_norm"] = "cross_norm"
        block |= hf.prefixed("layer.1.EncDecAttention", "cross_attention", attention)
    names: dict[str, Any] = {"final_layer_norm": "norm"}
    bias = "layer.0.SelfAttention.relative_attention_bias"
    if shares_bias:
        names[f"block.0.{bias}"] = "shared.0"
    else:
        block[bias] = "relative_bias_attention.relative_bias"
    return hf.prefixed(stack, ours, {**names, **hf.prefixed("block.*", "layers.*", block)})


def map_t5_names(config: hf.Config, *, tied: bool, shares_bias: bool) -> hf.NameMap:
    """Map the tensors of a model of T5's line."""
    names: dict[str, Any] = {"shared": "decoder.embedding"}
    for stack in ("encoder", "decoder"):
        names |= map_t5_stack(config, stack, stack, shares_bias=shares_bias)
    return names if tied else {**names, "lm_head": "decoder.head"}


def _map_encoder_names(config: hf.Config, *, shares_bias: bool) -> hf.NameMap:
    return {"shared": "embedding", **map_t5_stack(config, "encoder", "", shares_bias=shares_bias)}


def _find_callers(config: hf.Config) -> dict[str, str]:
    return dict.fromkeys(("encoder.embed_tokens", "decoder.embed_tokens"), "shared")


def _has_head(config: Mapping[str, Any], names: Collection[str]) -> bool:
    return "lm_head.weight" in names


def _lacks_decoder(config: Mapping[str, Any], names: Collection[str]) -> bool:
    return not any(name.startswith("decoder.") for name in names)


_IGNORED_KEYS = """
    dropout_rate dense_act_fn is_gated_act scale_decoder_outputs n_positions output_past tie_word_embeddings
""".split()


def make_t5_family(
    name: str,
    architecture: str,
    *,
    shares_bias: bool = True,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> hf.Family:
    """Make a family of T5's line, and of its files with only an encoder, which is then an `Encoder`.

    A file with a head of its own unties it, whatever its config says, as in transformers 5. `tie_word_embeddings` says
    that logits are divided by sqrt(d_model), in a family whose `defaults` have it.
    """

    def build(config: hf.Config, *, tied: bool, key: Key[Array, ""]) -> hf.EncoderDecoder:
        scaled = config.get("tie_word_embeddings", False)
        return build_t5(config, tied=tied, scaled=scaled, shares_bias=shares_bias, key=key)

    family = hf.Family(
        name=name,
        architecture=architecture,
        build=partial(build, tied=True),
        names=partial(map_t5_names, tied=True, shares_bias=shares_bias),
        defaults={
            **hf.START_DEFAULTS,
            "decoder_start_token_id": hf.optional_non_negative(0),
            "vocab_size": 32128,
            "hidden_size": 512,
            "head_dim": 64,
            "intermediate_size": 2048,
            "num_hidden_layers": 6,
            "num_decoder_layers": hf.optional_count(),
            "num_attention_heads": 8,
            "relative_attention_num_buckets": 32,
            "relative_attention_max_distance": 128,
            "feed_forward_proj": "relu",
            "rms_norm_eps": 1e-6,
            **defaults,
        },
        aliases={
            "d_model": "hidden_size",
            "d_kv": "head_dim",
            "d_ff": "intermediate_size",
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        required_values={"is_encoder_decoder": (True,)},
        ignored_keys=frozenset(_IGNORED_KEYS).difference(defaults),
        ignored_tensors=(r"EncDecAttention\.relative_attention_bias\.weight$",),
        callers=_find_callers,
        embedding="shared",
    )
    untied = dataclasses.replace(
        family,
        build=partial(build, tied=False),
        names=partial(map_t5_names, tied=False, shares_bias=shares_bias),
        fits=_has_head,
    )
    encoder = dataclasses.replace(
        family,
        architecture=architecture.replace("ForConditionalGeneration", "EncoderModel"),
        build=lambda config, key: build(config, tied=True, key=key).whole_encoder,
        names=partial(_map_encoder_names, shares_bias=shares_bias),
        required_values={"is_encoder_decoder": (True, False)},
        fits=_lacks_decoder,
    )
    return dataclasses.replace(family, variants=(encoder, untied))


T5 = make_t5_family("t5", "T5ForConditionalGeneration", defaults={"tie_word_embeddings": True})
