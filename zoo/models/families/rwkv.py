"""RWKV-4 (Peng et al., arXiv:2305.13048): time mixing and channel mixing, which both look back one token; and a norm of
what the embedding gives."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import RWKV4, LayerNorm, RWKV4ChannelMixing
from zoo.models.assemble import layer
from zoo.models.blocks import TwoMixerBlock
from zoo.models.decoder import Decoder
from zoo.models.facts import Config, Family, Row, Table, under
from zoo.models.pieces import decoder, layer_norm, out_scale

SHARED: Table = {
    "key": "key",
    "receptance": "receptance",
    "value": "value",
    "time_mix_key": Row(("key_mix",), ones=2),
    "time_mix_receptance": Row(("receptance_mix",), ones=2),
}
TIME_MIXING: Table = {
    **SHARED,
    "output": "out",
    "time_mix_value": Row(("value_mix",), ones=2),
    "time_decay": "decay",
    "time_first": "bonus",
}


def build(config: Config, *, key: Key[Array, ""]) -> Decoder:
    norm, embed, scale = layer_norm(config), config["hidden_size"], out_scale(config)
    mixer = partial(RWKV4, embed, inner=config["attention_hidden_size"], out_scale=scale)
    ffn = partial(RWKV4ChannelMixing, embed, config["intermediate_size"] or 4 * embed, out_scale=scale)
    kinds = [layer(TwoMixerBlock, norm=norm, mixer=mixer, ffn=ffn)] * config["num_hidden_layers"]
    last = partial(LayerNorm, embed, epsilon=1e-5)  # whatever the config says
    return decoder(config, kinds, last, embedding_norm=norm, lists_outputs=True, key=key)


def names(config: Config) -> Table:
    block = {
        "ln1": "mixer_norm",
        "ln2": "ffn_norm",
        **under("attention", "rwkv4", TIME_MIXING),
        **under("feed_forward", "rwkv4_channel_mixing", SHARED),
    }
    shell = {"embeddings": "embedding", "blocks.0.pre_ln": "embedding_norm", "ln_out": "norm"}
    return {**under("rwkv", "", {**shell, **under("blocks.*", "layers.*", block)}), "head": "head"}


RWKV = Family(
    name="rwkv",
    architecture="RwkvForCausalLM",
    build=build,
    names=names,
    defaults={
        "vocab_size": 50277,
        "hidden_size": 4096,
        "attention_hidden_size": None,
        "intermediate_size": None,
        "num_hidden_layers": 32,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    aliases={"layer_norm_epsilon": "layer_norm_eps"},
    only={"layer_norm_eps": (None,)},  # nobody reads this word
    inert=frozenset(
        {
            *("context_length", "max_position_embeddings"),  # what one kernel can do: the recurrence has no end
            "rescale_every",  # halves the stream for float16, and so what its hidden states are; the norm undoes it
        }
    ),
    head="head",
    embedding="rwkv.embeddings",
)
