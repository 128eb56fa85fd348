"""XLM-RoBERTa XL and XXL (Goyal et al., arXiv:2105.00572): XLM-RoBERTa with norms before the sublayers and after the
last layer, and with none after the embedding."""

import dataclasses
from functools import partial

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import roberta, xlm_roberta


def _build_xlm_roberta_xl(config: hf.Config, *, key: Key[Array, ""]) -> hf.Encoder:
    options = {"block": hf.Block, "embedding_norm": None, "final_norm": hf.make_layer_norm_factory(config)}
    return roberta.build_roberta("XLMRobertaXL", config, key=key, **options)


def _map_xlm_roberta_xl_names(config: hf.Config) -> hf.NameMap:
    names = dict(roberta.map_roberta_names("XLMRobertaXL", config))
    layer = "roberta.encoder.layer.*"
    del names["roberta.embeddings.LayerNorm"]
    names[f"{layer}.attention.self_attn_layer_norm"] = names.pop(f"{layer}.attention.output.LayerNorm")
    names[f"{layer}.LayerNorm"] = names.pop(f"{layer}.output.LayerNorm")
    return {**names, "roberta.encoder.LayerNorm": "norm"}


XLM_ROBERTA_XL = dataclasses.replace(
    xlm_roberta.XLM_ROBERTA,
    name="xlm-roberta-xl",
    architecture="XLMRobertaXLForMaskedLM",
    build=_build_xlm_roberta_xl,
    names=_map_xlm_roberta_xl_names,
    find_ignored_tensors=partial(hf.find_other_heads, _map_xlm_roberta_xl_names, "roberta", roberta.HEADS),
    defaults={
        **xlm_roberta.XLM_ROBERTA.declared,
        "vocab_size": 250880,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
    },
)
