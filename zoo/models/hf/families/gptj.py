"""GPT-J (Wang & Komatsuzaki, "GPT-J-6B", 2021): attention and feed-forward in parallel on one norm, and interleaved
RoPE on part of each head."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf
from zoo.ops.rotary import Rotary

from . import gpt2


def build_gptj(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    """Build the model of a GPT-J config."""
    dim = config["rotary_dim"]
    head_dim = hf.read_head_sizes(config)[2]
    if dim is None or dim % 2 or not 0 < dim <= head_dim:
        raise hf.ConfigError(f"rotary_dim = {dim}: rotary embeddings turn pairs of the {head_dim} values of each head")
    mixer = hf.make_attention_factory(config, rotary=Rotary(dim, interleaved=True))
    layers = [(mixer, hf.make_mlp_factory(config))] * config["num_hidden_layers"]
    norm = hf.make_layer_norm_factory(config)
    return hf.build_config_decoder(config, layers, norm, block=hf.make_one_norm_block, head_bias=True, key=key)


def _map_gptj_names(config: hf.Config) -> hf.NameMap:
    attention = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
    block = {
        "ln_1": "mixer_norm",
        **hf.prefixed("attn", "attention", attention),
        **hf.prefixed("mlp", "mlp", {"fc_in": "up", "fc_out": "down"}),
    }
    shell = {"wte": "embedding", "ln_f": "norm", **hf.prefixed("h.*", "layers.*", block)}
    return {**hf.prefixed("transformer", "", shell), "lm_head": "head"}


GPTJ = hf.Family(
    name="gptj",
    architecture="GPTJForCausalLM",
    build=build_gptj,
    names=_map_gptj_names,
    defaults={
        "vocab_size": 50400,
        "hidden_size": 4096,
        "intermediate_size": hf.optional_count(),
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rotary_dim": hf.optional_count(64),
    },
    aliases=hf.omit(gpt2.GPT2.aliases, "n_positions"),
    required_values={
        # the head has a bias, and a head that is tied to the embedding has none in `zoo.models.Decoder`
        "tie_word_embeddings": (False,),
        "rotary": (True,),
        "scale_attn_weights": (True,),
        **dict.fromkeys(("hidden_act", "intermediate_size", "layer_norm_eps"), (None,)),  # transformers reads none
    },
    ignored_keys=gpt2.GPT2.ignored_keys | {"n_positions", "max_position_embeddings"},
    ignored_tensors=gpt2.GPT2.ignored_tensors,
    embedding="transformer.wte",
)
