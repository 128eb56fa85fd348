"""HyperCLOVA X SEED Think (NAVER Cloud, arXiv:2506.22403): Granite's layer with norms after the sublayers, too, and
logits that are multiplied rather than divided."""

from functools import partial

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import granite, llama


def _build_hyperclovax(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    norm = hf.make_rms_norm_factory(config)
    mixer = granite.make_granite_attention_factory(config)
    ffn = hf.make_gated_mlp_factory(config, bias=config["mlp_bias"])
    layers = [(mixer, ffn)] * config["num_hidden_layers"]
    multipliers = {"multiplier": config["embedding_multiplier"], "logits_multiplier": config["logits_scaling"]}
    wiring = hf.make_sandwich_block(norm) if config["use_post_norm"] else hf.Block
    block = partial(wiring, residual_multiplier=config["residual_multiplier"])
    return hf.build_config_decoder(config, layers, norm, block=block, key=key, **multipliers)


def _map_hyperclovax_names(config: hf.Config) -> hf.NameMap:
    norms = {**llama.PRE_NORM_NAMES, "post_norm1": "mixer_post_norm", "post_norm2": "ffn_post_norm"}
    return llama.map_llama_layers(hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES), norms=norms)


HYPERCLOVAX = hf.Family(
    name="hyperclovax",
    architecture="HyperCLOVAXForCausalLM",
    build=_build_hyperclovax,
    names=_map_hyperclovax_names,
    defaults={
        **granite.GRANITE.declared,
        "attention_multiplier": hf.optional_number(),
        "use_post_norm": True,
    },
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
