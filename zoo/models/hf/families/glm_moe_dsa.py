"""GLM-5 (arXiv:2602.15763): DeepSeek-V3.2 with interleaved RoPE in the indexer, which some layers leave out: they take
the selection of the layer before. Layers of multi-token prediction (MTP), which files have after the last, are not
read."""

import dataclasses

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import deepseek_v2, deepseek_v32
from .glm_moe_dsa_layers import SelectionBlock

_PATTERN = hf.ValueKind("a word of the letters F and S", lambda value: hf.WORD.fits(value) and set(value) <= set("FS"))


def _build_glm_moe_dsa(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    types = read_indexer_types(config)
    indexer = deepseek_v32.make_indexer_factory(config, interleaved=True)
    indexers = {"full": indexer, "shared": None}
    factories = {kind: deepseek_v32.make_sparse_attention_factory(config, indexers[kind]) for kind in set(types)}
    mixers = [factories[kind] for kind in types]
    block = SelectionBlock if "shared" in types else hf.Block
    router = hf.make_biased_router_factory(config)
    return deepseek_v2.build_latent_decoder(config, router, mixers=mixers, block=block, key=key)


def read_indexer_types(config: hf.Config) -> list[str]:
    """Return "full" for each layer with an indexer, and "shared" for the others: as `indexer_types` says, or
    `index_topk_pattern`, or `index_topk_freq` and `index_skip_topk_offset`.

    **Raises** `ConfigError` for another number of layers, and for a first layer without an indexer.
    """
    layers = range(config["num_hidden_layers"])
    pattern = config["index_topk_pattern"]
    period = config["index_topk_freq"]
    offset = config["index_skip_topk_offset"]
    if config["indexer_types"] is not None:
        key = "indexer_types"
        types = config["indexer_types"]
    elif pattern is not None:
        key = "index_topk_pattern"
        types = [{"F": "full", "S": "shared"}[letter] for letter in pattern]
    else:
        key = "index_skip_topk_offset"
        types = ["shared" if max(layer - offset + 1, 0) % period else "full" for layer in layers]
    if len(types) != len(layers) or not set(types) <= {"full", "shared"}:
        raise hf.ConfigError(f"{key} should say full or shared for all {len(layers)} layers")
    if types[0] == "shared":
        raise hf.ConfigError(f"{key} lets the first layer share a selection of keys, and no layer comes before it")
    return types


_V32 = deepseek_v32.DEEPSEEK_V32

GLM_MOE_DSA = dataclasses.replace(
    _V32,
    name="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    build=_build_glm_moe_dsa,
    defaults={
        **_V32.declared,
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "num_key_value_heads": hf.optional_count(64),
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": hf.optional_count(2048),
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
        "indexer_types": hf.optional_words(),
        "index_topk_pattern": hf.Default(None, hf.optional(_PATTERN)),
        "index_topk_freq": 1,
        "index_skip_topk_offset": hf.non_negative(2),
    },
    required_values={**_V32.required_values, "indexer_rope_interleave": (True,)},
)
