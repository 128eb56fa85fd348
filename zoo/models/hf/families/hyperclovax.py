"""HyperCLOVA X SEED Think (NAVER Cloud, arXiv:2506.22403): Granite's layer with norms after the sublayers, too, and
logits that are multiplied rather than divided."""

from functools import partial

from jaxtyping import Array, Key

from zoo.models.decoder import Block, Decoder
from zoo.models.hf.builders import (
    build_config_decoder,
    make_gated_mlp_factory,
    make_rms_norm_factory,
    make_sandwich_block,
)
from zoo.models.hf.kinds import optional_number
from zoo.models.hf.spec import Config, Family, NameMap, prefixed

from . import granite, llama


def _build_hyperclovax(config: Config, *, key: Key[Array, ""]) -> Decoder:
    norm = make_rms_norm_factory(config)
    mixer = granite.make_granite_attention_factory(config)
    ffn = make_gated_mlp_factory(config, bias=config["mlp_bias"])
    layers = [(mixer, ffn)] * config["num_hidden_layers"]
    multipliers = {"multiplier": config["embedding_multiplier"], "logits_multiplier": config["logits_scaling"]}
    wiring = make_sandwich_block(norm) if config["use_post_norm"] else Block
    block = partial(wiring, residual_multiplier=config["residual_multiplier"])
    return build_config_decoder(config, layers, norm, block=block, key=key, **multipliers)


def _map_hyperclovax_names(config: Config) -> NameMap:
    norms = {**llama.PRE_NORM_NAMES, "post_norm1": "mixer_post_norm", "post_norm2": "ffn_post_norm"}
    return llama.map_llama_layers(prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES), norms=norms)


HYPERCLOVAX = Family(
    name="hyperclovax",
    architecture="HyperCLOVAXForCausalLM",
    build=_build_hyperclovax,
    names=_map_hyperclovax_names,
    defaults={
        **granite.GRANITE.declared,
        "attention_multiplier": optional_number(),
        "use_post_norm": True,
    },
    ignored_keys=frozenset({"resid_pdrop"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
