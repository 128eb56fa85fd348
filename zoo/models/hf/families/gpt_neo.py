"""GPT-Neo (Black et al., "GPT-Neo", EleutherAI, 2021): GPT-2's layers with scores that are not scaled, no biases of
queries, keys and values, and a sliding window in every other layer."""

from collections.abc import Sequence

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import gpt2

_GLOBAL, _LOCAL = "global", "local"


def _build_gpt_neo(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    windows = hf.list_layer_windows(_list_types(config), config["window_size"])
    mixers = hf.make_windowed_attention_factories(config, windows, rotary=None, scale=1.0, out_bias=True)
    ffn = hf.make_mlp_factory(config)
    layers = [(mixer, ffn) for mixer in mixers]
    positions = config["max_position_embeddings"]
    return hf.build_config_decoder(config, layers, hf.make_layer_norm_factory(config), positions=positions, key=key)


def _list_types(config: hf.Config) -> list[str]:
    """Return the attention type of each layer: from `attention_types`, runs of words with their numbers of repetitions,
    or every other layer local. **Raises** `ConfigError` unless they are as many as the layers."""
    layers = config["num_hidden_layers"]
    runs = config["attention_types"]
    if runs is None:
        return hf.list_layer_types(number % 2 for number in range(layers))
    words = [word for run, repetitions in runs for _ in range(repetitions) for word in run]
    if len(words) != layers:
        raise hf.ConfigError(f"attention_types says the kind of {len(words)} layers, and num_layers = {layers}")
    return hf.list_layer_types(word == _LOCAL for word in words)


def _map_gpt_neo_names(config: hf.Config) -> hf.NameMap:
    attention = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
    block = {
        "ln_1": "mixer_norm",
        "ln_2": "ffn_norm",
        **hf.prefixed("attn.attention", "attention", attention),
        **hf.prefixed("mlp", "mlp", {"c_fc": "up", "c_proj": "down"}),
    }
    shell = {"wte": "embedding", "wpe": "position_embedding", "ln_f": "norm", **hf.prefixed("h.*", "layers.*", block)}
    return {**hf.prefixed("transformer", "", shell), "lm_head": "head"}


def _is_run(value: object) -> bool:
    """Return True for [words, repetitions], as in [["global", "local"], 12]."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        return False
    words, repetitions = value
    is_list = isinstance(words, list | tuple) and all(word in (_GLOBAL, _LOCAL) for word in words)
    return is_list and hf.integer(minimum=0).fits(repetitions)


_RUNS = hf.optional(hf.list_of(hf.ValueKind('a run such as [["global", "local"], 12]', _is_run)))

GPT_NEO = hf.Family(
    name="gpt_neo",
    architecture="GPTNeoForCausalLM",
    build=_build_gpt_neo,
    names=_map_gpt_neo_names,
    defaults={
        "vocab_size": 50257,
        "hidden_size": 2048,
        "intermediate_size": hf.optional_count(),
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attention_types": hf.Default(None, _RUNS),
        "window_size": 256,
    },
    aliases={
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    required_values=dict.fromkeys(("hidden_act", "layer_norm_eps"), (None,)),  # transformers reads neither
    # attention_layers spells attention_types out, and transformers does not read it
    ignored_keys=gpt2.GPT2.ignored_keys | {"attention_layers", "resid_dropout", "embed_dropout"},
    ignored_tensors=(r"\.attn\.attention\.bias$", r"\.attn\.attention\.masked_bias$"),
    embedding="transformer.wte",
)
