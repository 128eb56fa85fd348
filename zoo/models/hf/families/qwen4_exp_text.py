"""Qwen4-Exp (Qwen team, 2026), its language model: gated residual streams; of four layers three with the gated delta
rule (arXiv:2412.06464) and the fourth with gated attention to the blocks that an indexer selects; a memory of n-grams
in some layers (arXiv:2601.07372); mixtures of experts with a gated shared expert. RMSNorm scales are 1 + w. Without
images, its multimodal RoPE is plain RoPE."""

from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
from jaxtyping import Array, Key

from zoo.layers import GatedAttention, IdentityNorm, IndexedAttention, MeanKeyIndexer, RMSNorm
from zoo.layers.ngram import NGramMemory
from zoo.layers.rotary import find_length_dependent_scaling
from zoo.models.hf import grammar as hf
from zoo.parallel import Dim

from . import qwen2_moe, qwen3_5_moe_text, qwen3_5_text

_INDEXED = ("indexed_attention", "full_attention", "qwen_sparse_attention", "deepseek_sparse_attention")
"""Names of a layer with attention in files and in versions of transformers."""
_INDEXER_SIZES = ("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
_MEMORY_SIZES = ("ple_embed_dim", "ngram_size", "heads_per_ngram", "split_ngram_parts", "ngram_vocab_size_base")
_GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}
_GATE = hf.ValueKind("null, silu or sigmoid", lambda value: value is None or (hf.WORD.fits(value) and value in _GATES))
_ID = hf.integer(minimum=0)
_IDS = hf.ValueKind("an id, or ids", lambda value: _ID.fits(value) or (hf.list_of(_ID).fits(value) and value != []))


def _build_qwen4_exp(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    experts = qwen2_moe.make_qwen2_moe_mixture(config, renormalize=True)
    numbers = range(config["num_hidden_layers"])
    interval = config["full_attention_interval"]
    default = ["linear_attention" if (n + 1) % interval else _INDEXED[0] for n in numbers]
    gate = _GATES[config["output_gate_type"] or "silu"]
    delta = partial(qwen3_5_text.make_delta_factory(config), gate_activation=gate)
    mixers = {"linear_attention": delta} | dict.fromkeys(_INDEXED, _make_indexed_factory(config))
    wiring = hf.make_gated_connections(
        config["hidden_size"],
        config["hc_count"],
        config["hc_lowrank"],
        epsilon=config["rms_norm_eps"],
        offset=1.0,
        keeps_tokens=bool(config["ple_layer_ids"]),
        key=jax.random.fold_in(key, 1),
    )
    memories = _make_memories(config)
    wiring["block"] = [
        partial(hf.make_ngram_block, memories[n], jax.random.fold_in(key, 2 + n)) if n in memories else wiring["block"]
        for n in numbers
    ]
    layers = [(mixer, experts) for mixer in hf.pick_mixers(hf.read_layer_types(config, default), mixers)]
    return hf.build_config_decoder(config, layers, IdentityNorm, key=key, **wiring)


def _make_indexed_factory(config: hf.Config) -> Callable[..., IndexedAttention]:
    """**Raises** `ConfigError` for sizes of the indexer that are missing, or that do not fit together."""
    for name in _INDEXER_SIZES:
        if config[name] is None:
            raise hf.ConfigError(f"{name} has to be given: the family has no usual value for it")
    budget = config["indexer_budget"]
    block = config["indexer_compress_ratio"]
    if budget % block:
        raise hf.ConfigError(f"indexer_budget = {budget} is not a multiple of indexer_compress_ratio = {block}")
    size = config["indexer_head_dim"]
    rotary = hf.build_rotary(config)
    if find_length_dependent_scaling(rotary) is not None:
        kind = config["rope_parameters"]["rope_type"]
        raise hf.ConfigError(f"rope_type {kind!r}: keys of blocks are turned once, and it depends on the length")
    if rotary.dim > size:
        raise hf.ConfigError(f"indexer_head_dim = {size}, and {rotary.dim} of them are to be turned")
    norm = partial(RMSNorm, size, features=Dim("head_dim"), epsilon=config["rms_norm_eps"], offset=1.0)
    sizes = {"head_dim": size, "block": block, "top": budget // block}
    indexer = partial(MeanKeyIndexer, config["hidden_size"], config["indexer_n_heads"], **sizes, norm=norm)
    attention = partial(IndexedAttention, indexer=indexer, attention=GatedAttention)
    qk_norm = hf.make_head_norm_factory(config, offset=1.0)
    return hf.make_attention_factory(config, attention=attention, rotary=rotary, qk_norm=qk_norm)


def _make_memories(config: hf.Config) -> dict[int, Callable[..., NGramMemory]]:
    """Return the factory of the memory of n-grams of each layer that has one, by the number of the layer from 0.

    **Raises** `ConfigError` for the number of a layer that there is not, and for sizes that do not fit together."""
    layers = sorted(set(config["ple_layer_ids"] or ()))
    memories: dict[int, Callable[..., NGramMemory]] = {}
    if not layers:
        return memories
    if not 1 <= layers[0] <= layers[-1] <= config["num_hidden_layers"]:
        raise hf.ConfigError(f"ple_layer_ids = {layers}: layers are counted from 1 to {config['num_hidden_layers']}")
    end = config["eos_token_id"]
    if end is None:
        raise hf.ConfigError("eos_token_id has to be given: the family has no usual value for it")
    make = partial(
        NGramMemory,
        config["hidden_size"],
        config["vocab_size"],
        size=config["ngram_vocab_size_base"],
        boundary=end if isinstance(end, int) else end[0],
        streams=config["hc_count"],
        memory=config["ple_embed_dim"],
        conv_width=config["ple_conv_kernel_size"],
        order=config["ngram_size"],
        heads=config["heads_per_ngram"],
        seed=config["seed"],
        parts=config["split_ngram_parts"],
        multiple=config["make_ngram_vocab_size_divisible_by"],
        epsilon=config["rms_norm_eps"],
        offset=1.0,
    )
    for number, layer in enumerate(layers):
        memories[layer - 1] = partial(make, number=number)
        try:
            eqx.filter_eval_shape(memories[layer - 1], key=jax.random.key(0))
        except ValueError as error:
            sizes = ", ".join(f"{name} = {config[name]}" for name in _MEMORY_SIZES)
            raise hf.ConfigError(f"{sizes}: {error}") from None
    return memories


_CONNECTION_NAMES: hf.NameMap = {
    "hc_norm": "norm",
    "input_mix_weight_down": "down",
    "input_mix_weight_up": "up",
    "block_inject_weight": "inject",
}
_FILE_TABLES: hf.NameMap = {"ple_embedding.ngram_embedding.shard_*": "embedding.tables.*"}
_MODULE_TABLES: hf.NameMap = {"ple_embedding.ngram_embedding": hf.TensorMapping(("embedding.tables.*",), merged=True)}
_MEMORY_NAMES: hf.NameMap = {
    "key_proj": "key",
    "value_proj": "value",
    "norm_query": "query_norm",
    "norm_key": "key_norm",
    "norm_conv": "conv_norm",
    "conv1d": hf.fused("convolution", conv1d_filters=True),
}
_INDEXER_NAMES: hf.NameMap = {
    "index_qk_proj": hf.fused("query", "key"),
    "q_layernorm": "query_norm",
    "k_layernorm": "key_norm",
}


def _map_qwen4_exp_layers(config: hf.Config, mixture: hf.NameMap, tables: hf.NameMap) -> hf.NameMap:
    """Return the name map of a model, from the names of its mixtures of experts and of its tables of n-grams."""
    delta = {**qwen3_5_text.DELTA_INPUT_NAMES, **qwen3_5_text.DELTA_NAMES, "norm": "readout.norm"}
    attention = {
        **hf.prefixed("", "attention", qwen3_5_text.name_gated_attention(config)),
        **hf.prefixed("indexer", "indexer", _INDEXER_NAMES),
    }
    block = {
        **hf.prefixed("linear_attn", "grouped_gated_delta_net", delta),
        **hf.prefixed("self_attn", "indexed_attention", attention),
        **hf.prefixed("mlp", "mixture_of_experts", mixture),
        **hf.prefixed("attn_hyper_connection", "mixer_connection", _CONNECTION_NAMES),
        **hf.prefixed("mlp_hyper_connection", "ffn_connection", _CONNECTION_NAMES),
        **hf.prefixed("ple", "memory", {**_MEMORY_NAMES, **tables}),
    }
    shell = {
        "model.embed_tokens": "embedding",
        "lm_head": "head",
        **hf.prefixed(
            "model.hyper_connection_mixer", "norm.connection", hf.omit(_CONNECTION_NAMES, "block_inject_weight")
        ),
    }
    return {**shell, **hf.prefixed("model.layers.*", "layers.*", block)}


def _map_qwen4_exp_names(config: hf.Config) -> hf.NameMap:
    return _map_qwen4_exp_layers(config, qwen2_moe.MIXTURE_NAMES, _FILE_TABLES)


def _map_qwen4_exp_memory_names(config: hf.Config) -> hf.NameMap:
    return _map_qwen4_exp_layers(config, qwen2_moe.FUSED_MIXTURE_NAMES, _MODULE_TABLES)


QWEN4_EXP_TEXT = hf.Family(
    name="qwen4_exp_text",
    architecture="Qwen4ExpForCausalLM",
    build=_build_qwen4_exp,
    names=_map_qwen4_exp_names,
    defaults={
        **qwen3_5_moe_text.DEFAULTS,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "hc_count": 4,
        "hc_lowrank": 320,
        "output_gate_type": hf.Default(None, _GATE),
        "indexer_n_heads": hf.optional_count(),
        "indexer_head_dim": hf.optional_count(),
        "indexer_budget": hf.optional_count(),
        "indexer_compress_ratio": hf.optional_count(),
        "ple_layer_ids": hf.optional_layer_numbers(),
        "ple_embed_dim": hf.optional_count(),
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000,
        "make_ngram_vocab_size_divisible_by": 128,
        "seed": hf.non_negative(1234),
        "split_ngram_parts": 512,
        "eos_token_id": hf.Default(None, hf.optional(_IDS)),
    },
    required_values={
        **qwen3_5_moe_text.QWEN3_5_MOE_TEXT.required_values,
        "hidden_act": ("silu",),
        "indexer_kv_heads": (1, None),
    },
    ignored_keys=qwen3_5_moe_text.QWEN3_5_MOE_TEXT.ignored_keys | {"number_of_conv_states"},
    ignored_tensors=(
        *qwen3_5_moe_text.QWEN3_5_MOE_TEXT.ignored_tensors,
        r"\.ple_embedding\.(layer_multipliers|ngram_heads_vocab_sizes|ngram_heads_offsets)$",
    ),
    other_modules=qwen3_5_moe_text.QWEN3_5_MOE_TEXT.other_modules,
    memory_names=_map_qwen4_exp_memory_names,
)
