"""OLMo (Groeneveld et al., arXiv:2402.00838): LLaMA's layer with LayerNorms that have no parameters, and clipping of
queries, keys and values if `clip_qkv` is set."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import LayerNorm
from zoo.models.hf import grammar as hf

from . import llama


def _build_olmo(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    bias = config["attention_bias"]
    norm = partial(LayerNorm, config["hidden_size"], scaled=False, bias=False)
    mixer = hf.make_attention_factory(config, bias=bias, out_bias=bias, clip=config["clip_qkv"])
    layers = [(mixer, hf.make_gated_mlp_factory(config))] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, norm, key=key)


OLMO = hf.Family(
    name="olmo",
    architecture="OlmoForCausalLM",
    build=_build_olmo,
    names=llama.map_llama_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "mlp_bias", "rms_norm_eps"),
        "vocab_size": 50304,
        "clip_qkv": hf.optional_number(),
    },
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
