"""RoBERTa with norms before the sublayers and after the last layer (Ott et al., arXiv:1904.01038), as in "Should You
Mask 15%" (Wettig et al., arXiv:2202.08005)."""

import dataclasses
from functools import partial

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import bert, roberta

_BASE = "roberta_prelayernorm"


def _build_roberta_prelayernorm(config: hf.Config, *, key: Key[Array, ""]) -> hf.Encoder:
    options = {"block": hf.Block, "final_norm": hf.make_layer_norm_factory(config)}
    return roberta.build_roberta("RobertaPreLayerNorm", config, key=key, **options)


def _map_roberta_prelayernorm_names(config: hf.Config) -> hf.NameMap:
    names = dict(bert.map_bert_layers(_BASE))
    layer = f"{_BASE}.encoder.layer.*"
    names[f"{layer}.attention.LayerNorm"] = names.pop(f"{layer}.attention.output.LayerNorm")
    names[f"{layer}.intermediate.LayerNorm"] = names.pop(f"{layer}.output.LayerNorm")
    heads = roberta.map_roberta_heads("RobertaPreLayerNorm", _BASE, config)
    return {**names, f"{_BASE}.LayerNorm": "norm", **heads}


ROBERTA_PRELAYERNORM = dataclasses.replace(
    roberta.ROBERTA,
    name="roberta-prelayernorm",
    architecture="RobertaPreLayerNormForMaskedLM",
    build=_build_roberta_prelayernorm,
    names=_map_roberta_prelayernorm_names,
    find_ignored_tensors=partial(hf.find_other_heads, _map_roberta_prelayernorm_names, _BASE, roberta.HEADS),
    embedding=f"{_BASE}.embeddings.word_embeddings",
)
