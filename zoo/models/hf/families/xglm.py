"""XGLM (Lin et al., arXiv:2112.10668): BioGPT's layers with sinusoidal positions, which no file holds."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import LayerNorm
from zoo.layers.embedding import SinusoidalPositionEmbedding
from zoo.models.hf import grammar as hf

from . import opt


def _build_xglm(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    embed = config["hidden_size"]
    mixer = hf.make_attention_factory(config, rotary=None, bias=True, out_bias=True)
    layers = [(mixer, hf.make_mlp_factory(config))] * config["num_hidden_layers"]
    try:
        positions = SinusoidalPositionEmbedding(embed, offset=2)
    except ValueError as error:
        raise hf.ConfigError(f"d_model = {embed}: {error}") from None
    if config["scale_embedding"]:
        multiplier = embed**0.5
    else:
        multiplier = 1.0
    options = {"positions": positions, "multiplier": multiplier}
    return hf.build_config_decoder(config, layers, partial(LayerNorm, embed), key=key, **options)


def _map_xglm_names(config: hf.Config) -> hf.NameMap:
    shell = {"embed_tokens": "embedding", "layer_norm": "norm", **hf.prefixed("layers.*", "layers.*", opt.BLOCK_NAMES)}
    return {**hf.prefixed("model", "", shell), "lm_head": "head"}


XGLM = hf.Family(
    name="xglm",
    architecture="XGLMForCausalLM",
    build=_build_xglm,
    names=_map_xglm_names,
    defaults={
        "vocab_size": 256008,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
        "scale_embedding": True,
    },
    aliases={
        "d_model": "hidden_size",
        "ffn_dim": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "attention_heads": "num_attention_heads",
        "activation_function": "hidden_act",
    },
    required_values={
        "pad_token_id": (None, 0, 1),  # the class sets the vector of this row to 0, and the first two are not used
        **dict.fromkeys(("hidden_act", "intermediate_size"), (None,)),  # transformers reads neither
    },
    ignored_keys=frozenset({"activation_dropout", "dropout", "init_std", "layerdrop", "max_position_embeddings"}),
    ignored_tensors=(r"^model\.embed_positions\.weights$",),
)
