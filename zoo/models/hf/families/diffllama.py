"""DiffLlama (2024): LLaMA's layer with differential attention (arXiv:2410.05258), whose two maps have the first and the
second half of the query and key heads; both halves of the value heads are one value."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import DifferentialAttention, RMSNorm
from zoo.layers.attention.differential import compute_lambda_init
from zoo.models.hf import grammar as hf

from . import llama


def _build_diffllama(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    heads, kv_heads, head_dim = hf.read_head_sizes(config)
    if kv_heads % 2:
        raise hf.ConfigError(f"num_key_value_heads = {kv_heads} heads do not divide evenly over two maps")
    paired = hf.Config(config, num_attention_heads=heads // 2, num_key_value_heads=kv_heads // 2, head_dim=2 * head_dim)
    bias = config["attention_bias"]
    mixer = hf.make_attention_factory(
        paired,
        attention=DifferentialAttention,
        rotary=hf.build_rotary(config),
        norm=partial(RMSNorm, epsilon=config["rms_norm_eps"], scaled=False),
        bias=bias,
        out_bias=bias,
    )
    layers = [(mixer, hf.make_gated_mlp_factory(config))] * config["num_hidden_layers"]
    model = hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), key=key)
    return hf.set_by_layer(model, "differential_attention.lambda_init", compute_lambda_init)


def _map_diffllama_names(config: hf.Config) -> hf.NameMap:
    heads, kv_heads, _ = hf.read_head_sizes(config)
    attention: hf.NameMap = {
        "q_proj": hf.TensorMapping(("query",), heads // 2, runs=2),
        "k_proj": hf.TensorMapping(("key",), kv_heads // 2, runs=2),
        "v_proj": hf.TensorMapping(("value",), kv_heads // 2, runs=2),
        "o_proj": "out",
        **{name: name for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "lambda_init")},
    }
    mixer = hf.prefixed("self_attn", "differential_attention", attention)
    return llama.map_llama_layers(hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES), mixer)


DIFFLLAMA = hf.Family(
    name="diffllama",
    architecture="DiffLlamaForCausalLM",
    build=_build_diffllama,
    names=_map_diffllama_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "mlp_bias"),
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "rms_norm_eps": 1e-5,
    },
    required_values={"attention_dropout": (0.0, None)},
    ignored_keys=frozenset({"lambda_std_dev"}),  # initialization
    ignored_tensors=llama.LLAMA.ignored_tensors,
    optional_tensors=(r"\.lambda_init$",),  # follows from the number of the layer
)
