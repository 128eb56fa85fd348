"""GPT-NeoX (Black et al., arXiv:2204.06745) and Pythia (Biderman et al., arXiv:2304.01373): attention and feed-forward
side by side, a rotation of part of each head; queries, keys and values in one matrix, head by head."""

from jaxtyping import Array, Key

from zoo.models.assemble import layer
from zoo.models.blocks import Block, ParallelBlock
from zoo.models.decoder import Decoder
from zoo.models.facts import Config, Family, Table, fused, under
from zoo.models.pieces import attention, decoder, layer_norm, mlp


def build(config: Config, *, key: Key[Array, ""]) -> Decoder:
    norm, bias = layer_norm(config), config["attention_bias"]
    block = ParallelBlock if config["use_parallel_residual"] else Block
    kind = layer(block, norm=norm, mixer=attention(config, bias=bias, out_bias=bias), ffn=mlp(config))
    return decoder(config, [kind] * config["num_hidden_layers"], norm, key=key)


def names(config: Config) -> Table:
    per_head = fused("query", "key", "value", groups=config["num_attention_heads"])
    block = {
        "input_layernorm": "mixer_norm",
        "post_attention_layernorm": "ffn_norm",
        **under("attention", "attention", {"query_key_value": per_head, "dense": "out"}),
        **under("mlp", "mlp", {"dense_h_to_4h": "up", "dense_4h_to_h": "down"}),
    }
    shell = {"embed_in": "embedding", "final_layer_norm": "norm", **under("layers.*", "layers.*", block)}
    return {**under("gpt_neox", "", shell), "embed_out": "head"}


GPT_NEOX = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    build=build,
    names=names,
    defaults={
        "vocab_size": 50432,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "attention_bias": True,
        "use_parallel_residual": True,
    },
    aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    ignored=(r"\.attention\.bias$", r"\.attention\.masked_bias$", r"\.rotary_emb\.inv_freq$"),
    only={"rope_theta": (None,), "partial_rotary_factor": (None,)},  # nobody reads them outside of rope_parameters
    live={"lm_head": "embed_out"},
    head="embed_out",
    embedding="gpt_neox.embed_in",
)
