"""Gemma 3, text (Gemma team, arXiv:2503.19786): Gemma 2's layer with QK norm instead of soft caps; of six layers, five
have a sliding window and a RoPE of smaller base."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import gemma2, llama


def _build_gemma3_text(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    types = hf.read_layer_types(config, hf.list_patterned_types(config))
    windows = hf.list_layer_windows(types, config["sliding_window"])
    rotaries = hf.build_layer_rotaries(config, types)
    options = gemma2.read_score_options(hf.Config(config, attn_logit_softcapping=None))
    options["qk_norm"] = hf.make_head_norm_factory(config, offset=1.0)
    mixers = hf.make_layerwise_attention_factories(config, windows, rotaries, **options)
    return gemma2.build_sandwich_decoder(config, mixers, key=key)


GEMMA3_TEXT = hf.Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    build=_build_gemma3_text,
    names=gemma2.map_gemma2_names,
    defaults={
        **hf.omit(gemma2.DEFAULTS, "attn_logit_softcapping"),
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 10000.0},
            "full_attention": {"rope_theta": 1000000.0},
        },
        "final_logit_softcapping": hf.optional_number(),
        "sliding_window_pattern": hf.Default(6, hf.WINDOW_PATTERN),
        "sliding_rope_theta": hf.optional_number(),
    },
    aliases={
        "hidden_activation": "hidden_act",
        "_sliding_window_pattern": "sliding_window_pattern",
        "rope_local_base_freq": "sliding_rope_theta",
    },
    required_values=gemma2.GEMMA2.required_values,
    # transformers takes a soft cap of attention for Gemma 3, too, and does not apply it
    ignored_keys=gemma2.GEMMA2.ignored_keys | {"attn_logit_softcapping"},
    ignored_tensors=llama.LLAMA.ignored_tensors,
)
