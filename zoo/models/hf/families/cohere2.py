"""Command R7B and Command A (Cohere team, arXiv:2504.00698): Command R's layer; of four layers, three have a sliding
window and RoPE, and the fourth has neither."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import cohere, llama


def _build_cohere2(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    bias = config["attention_bias"]
    rotary = hf.build_rotary(config, interleaved=True)
    types = hf.read_layer_types(config, hf.list_patterned_types(config))
    windows = hf.list_layer_windows(types, config["sliding_window"])
    rotaries = [None if window is None else rotary for window in windows]
    mixers = hf.make_layerwise_attention_factories(config, windows, rotaries, bias=bias, out_bias=bias)
    return cohere.build_cohere_layers(config, mixers, key=key)


COHERE2 = hf.Family(
    name="cohere2",
    architecture="Cohere2ForCausalLM",
    build=_build_cohere2,
    names=cohere.map_cohere_names,
    defaults={
        **cohere.DEFAULTS,
        "rope_parameters": {"rope_theta": 10000.0},
        "sliding_window": hf.optional_non_negative(4096),
        "sliding_window_pattern": hf.Default(4, hf.WINDOW_PATTERN),
        "layer_types": hf.optional_words(),
    },
    aliases={"_sliding_window_pattern": "sliding_window_pattern"},
    required_values={
        "use_qk_norm": (False,),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
        "position_embedding_type": ("rope_gptj",),
        "rotary_pct": (1.0,),
    },
    ignored_keys=frozenset(
        {"layer_switch", "order_of_interleaved_layers", "use_embedding_sharing", "use_parallel_embedding"}
    ),
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
