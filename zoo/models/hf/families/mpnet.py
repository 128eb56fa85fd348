"""MPNet (Song et al., arXiv:2004.09297): RoBERTa's layers and heads with T5's biases of relative position, which all
layers share, and without token types."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers.attention.relative_bias import RelativeBias, RelativeBiasAttention
from zoo.models.hf import grammar as hf

from . import bert, roberta

_BUCKETS = 32


def _build_mpnet(config: hf.Config, *, key: Key[Array, ""]) -> hf.Encoder:
    heads = hf.read_head_sizes(config)[0]
    options = {"bias": True, "out_bias": True, "out_scale": hf.compute_out_scale(config)}
    mixer = partial(RelativeBiasAttention, config["hidden_size"], heads, partial(hf.make_shared_module, 0), **options)
    shared = [partial(RelativeBias, _BUCKETS, heads)]
    return roberta.build_roberta("MPNet", config, offset=2, mixer=mixer, shared=shared, key=key)


def _map_mpnet_names(config: hf.Config) -> hf.NameMap:
    attention: hf.NameMap = {
        **hf.prefixed("attn", "relative_bias_attention", {"q": "query", "k": "key", "v": "value", "o": "out"}),
        "LayerNorm": "mixer_norm",
    }
    return {
        **bert.map_bert_layers("mpnet", attention),
        "mpnet.encoder.relative_attention_bias": "shared.0",
        **roberta.map_roberta_heads("MPNet", "mpnet", config),
    }


MPNET = hf.Family(
    name="mpnet",
    architecture="MPNetForMaskedLM",
    build=_build_mpnet,
    names=_map_mpnet_names,
    defaults={
        **hf.omit(bert.DEFAULTS, "type_vocab_size"),
        "vocab_size": 30527,
    },
    # with another number of buckets, the class in transformers computes 32 all the same
    required_values={"tie_word_embeddings": (True,), "relative_attention_num_buckets": (_BUCKETS,)},
    ignored_tensors=roberta.ROBERTA.ignored_tensors,
    find_ignored_tensors=partial(hf.find_other_heads, _map_mpnet_names, "mpnet", roberta.HEADS),
    head="lm_head.decoder",
    embedding="mpnet.embeddings.word_embeddings",
)
