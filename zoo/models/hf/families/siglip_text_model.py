"""SigLIP's encoder of texts (Zhai et al., arXiv:2303.15343): layers that attend in both directions, also to padding,
pooled at the last place."""

from functools import partial

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import clip_text_model
from .siglip_text_model_layers import LastPlacePooler


def _build_siglip_text(config: hf.Config, *, key: Key[Array, ""]) -> hf.Encoder:
    size = config["hidden_size"]
    pooler = partial(LastPlacePooler, size, config["projection_size"] or size)
    mixer = hf.make_bidirectional_attention_factory(config, bias=True, out_bias=True)
    heads = {"Model": hf.make_feature_head_factory(pooler)}
    return clip_text_model.build_text_layers(config, mixer, "SiglipText", heads, key=key)


SIGLIP_TEXT_MODEL = hf.Family(
    name="siglip_text_model",
    architecture="SiglipTextModel",
    build=_build_siglip_text,
    names=partial(clip_text_model.map_text_names, "bidirectional_attention"),
    defaults={
        **hf.omit(hf.HEAD_DEFAULTS, *hf.LABEL_KEYS),
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 64,
        "layer_norm_eps": 1e-6,
        "projection_size": hf.optional_count(),
    },
    required_values=hf.ONLY_BIDIRECTIONAL,
    ignored_tensors=(r"embeddings\.position_ids$",),
)
