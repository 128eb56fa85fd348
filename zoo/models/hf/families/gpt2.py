"""GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019): learned positions, LayerNorm,
biases everywhere; matrices stored as (in, out), with a fused QKV projection."""

from functools import partial

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf


def _build_gpt2(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    norm = hf.make_layer_norm_factory(config)
    ffn = hf.make_mlp_factory(config)
    count = config["num_hidden_layers"]
    make = partial(hf.make_attention_factory, config, rotary=None, bias=True, out_bias=True)
    scale = None if config["scale_attn_weights"] else 1.0
    if config["scale_attn_by_inverse_layer_idx"]:
        whole = hf.read_head_sizes(config)[2] ** -0.5 if scale is None else scale
        mixers = [make(scale=whole / number) for number in range(1, count + 1)]
    else:
        mixers = [make(scale=scale)] * count
    layers = [(mixer, ffn) for mixer in mixers]
    return hf.build_config_decoder(config, layers, norm, positions=config["max_position_embeddings"], key=key)


def _map_gpt2_names(config: hf.Config) -> hf.NameMap:
    attention = {
        "c_attn": hf.fused("query", "key", "value", transposed=True),
        "c_proj": hf.fused("out", transposed=True),
    }
    mlp = {"c_fc": hf.fused("up", transposed=True), "c_proj": hf.fused("down", transposed=True)}
    block = {
        "ln_1": "mixer_norm",
        "ln_2": "ffn_norm",
        **hf.prefixed("attn", "attention", attention),
        **hf.prefixed("mlp", "mlp", mlp),
    }
    shell = {"wte": "embedding", "wpe": "position_embedding", "ln_f": "norm", **hf.prefixed("h.*", "layers.*", block)}
    return {**hf.prefixed("transformer", "", shell), "lm_head": "head"}


GPT2 = hf.Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    build=_build_gpt2,
    names=_map_gpt2_names,
    defaults={
        "vocab_size": 50257,
        "hidden_size": 768,
        "intermediate_size": hf.optional_count(),
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 1024,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
    aliases={
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    required_values={
        # transformers does not read these keys
        **dict.fromkeys(("hidden_act", "intermediate_size", "layer_norm_eps"), (None,)),
    },
    # scores are float32 here, with reorder_and_upcast_attn and without
    ignored_keys=frozenset(
        {
            *("n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_activation", "summary_first_dropout"),
            *("summary_proj_to_labels", "summary_use_proj"),
        }
    ),
    ignored_tensors=(r"\.attn\.bias$", r"\.attn\.masked_bias$"),
    embedding="transformer.wte",
)
