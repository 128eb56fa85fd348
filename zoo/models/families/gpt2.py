"""GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019): learned positions, layer norms,
biases everywhere; matrices stored (in, out), with queries, keys and values in one."""

from jaxtyping import Array, Key

from zoo.models.assemble import layer
from zoo.models.blocks import Block
from zoo.models.decoder import Decoder
from zoo.models.facts import Config, Family, Table, fused, under
from zoo.models.pieces import attention, decoder, layer_norm, mlp


def build(config: Config, *, key: Key[Array, ""]) -> Decoder:
    norm, scale = layer_norm(config), None if config["scale_attn_weights"] else 1.0
    mixer = attention(config, rotary=None, bias=True, out_bias=True, scale=scale)
    kinds = [layer(Block, norm=norm, mixer=mixer, ffn=mlp(config))] * config["num_hidden_layers"]
    return decoder(config, kinds, norm, positions=config["max_position_embeddings"], key=key)


def names(config: Config) -> Table:
    attention = {"c_attn": fused("query", "key", "value", transposed=True), "c_proj": fused("out", transposed=True)}
    mlp = {"c_fc": fused("up", transposed=True), "c_proj": fused("down", transposed=True)}
    block = {
        "ln_1": "mixer_norm",
        "ln_2": "ffn_norm",
        **under("attn", "attention", attention),
        **under("mlp", "mlp", mlp),
    }
    shell = {"wte": "embedding", "wpe": "position_embedding", "ln_f": "norm", **under("h.*", "layers.*", block)}
    return {**under("transformer", "", shell), "lm_head": "head"}


GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    build=build,
    names=names,
    defaults={
        "vocab_size": 50257,
        "hidden_size": 768,
        "intermediate_size": None,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 1024,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
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
    only={
        "scale_attn_by_inverse_layer_idx": (False,),
        **dict.fromkeys(("hidden_act", "intermediate_size", "layer_norm_eps"), (None,)),  # nobody reads these words
    },
    inert=frozenset(
        {
            *("n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_activation", "summary_first_dropout"),
            *("summary_proj_to_labels", "summary_use_proj"),
        }
    ),
    ignored=(r"\.attn\.bias$", r"\.attn\.masked_bias$"),
    embedding="transformer.wte",
)
