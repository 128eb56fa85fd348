"""BioGPT (Luo et al., arXiv:2210.10341): GPT-2's layers, embeddings times sqrt(hidden_size), and learned positions
after two unused rows."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import LayerNorm
from zoo.models.hf import grammar as hf

from . import opt


def _build_biogpt(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    embed = config["hidden_size"]
    mixer = hf.make_attention_factory(config, rotary=None, bias=True, out_bias=True)
    layers = [(mixer, hf.make_mlp_factory(config))] * config["num_hidden_layers"]
    if config["scale_embedding"]:
        multiplier = embed**0.5
    else:
        multiplier = 1.0
    options = {"positions": config["max_position_embeddings"], "position_offset": 2, "multiplier": multiplier}
    return hf.build_config_decoder(config, layers, partial(LayerNorm, embed), key=key, **options)


def _map_biogpt_names(config: hf.Config) -> hf.NameMap:
    shell = {"embed_tokens": "embedding", "embed_positions": "position_embedding", "layer_norm": "norm"}
    block = hf.prefixed("layers.*", "layers.*", opt.BLOCK_NAMES)
    return {**hf.prefixed("biogpt", "", {**shell, **block}), "output_projection": "head"}


BIOGPT = hf.Family(
    name="biogpt",
    architecture="BioGptForCausalLM",
    build=_build_biogpt,
    names=_map_biogpt_names,
    defaults={
        "vocab_size": 42384,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "hidden_act": "gelu",
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "scale_embedding": True,
    },
    # its norms have an epsilon of 1e-5, whatever layer_norm_eps says
    ignored_keys=frozenset({"layer_norm_eps", "layerdrop", "activation_dropout"}),
    head="output_projection",
    embedding="biogpt.embed_tokens",
)
