"""Checkpoints that `zoo.load` does not read, and the reasons: its error gives them, and the page of families."""

from collections.abc import Mapping

_MODEL_TYPES_BY_REASON: Mapping[str, tuple[str, ...]] = {
    "an encoder and a decoder with cross-attention, and a model here is one stack": (
        *("t5", "mt5", "umt5", "t5gemma", "bart", "mbart", "m2m_100", "marian", "pegasus", "whisper"),
    ),
    "one block of attention whose weights several layers share, each with low-rank updates of its own": (
        *("zamba", "zamba2"),
    ),
    "gated short convolutions in some layers and attention in others": ("lfm2", "lfm2_moe"),
    "lightning attention in some layers and softmax attention in others, with scaled residuals": ("minimax",),
    "a mixture of experts after Gated DeltaNet, whose dense family is qwen3_5_text": (
        *("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"),
    ),
    "BERT's relatives with sublayers, names or positions of their own": (
        *("albert", "distilbert", "electra", "mpnet", "nomic_bert", "camembert", "xlm-roberta-xl", "deberta"),
    ),
    "a tower of images and one of texts, of which only siglip_vision_model is read": (
        *("clip", "siglip", "siglip2", "siglip_text_model", "clip_vision_model"),
    ),
    "its language model sees images by cross-attention, or texts with a mask of its own": ("mllama", "paligemma"),
    "positions of three dims, of which texts use one": (
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe"),
    ),
    "codes of sounds beside texts": ("qwen2_audio", "qwen2_5_omni", "qwen3_omni_moe"),
    "RWKV after its fourth version has no class in transformers": ("rwkv5", "rwkv6", "rwkv7"),
}
REFUSED_VARIANTS: Mapping[str, str] = {
    "DeBERTa v2 xlarge and xxlarge": "`conv_kernel_size`: a convolution beside the first layer.",
    "OPT-350m": "`do_layer_norm_before: false` and `word_embed_proj_dim`: norms after the sums, a projected embedding.",
}
"""Checkpoints of families that are read, and the keys of their configs that are refused by name."""


def find_reason(model_type: object) -> str | None:
    """Return the unsupported feature of a model, by its `model_type`; None for a type that is not listed."""
    return next((reason for reason, listed in _MODEL_TYPES_BY_REASON.items() if model_type in listed), None)


def list_reasons() -> list[tuple[list[str], str]]:
    """Return the reasons, each after the `model_type`s that it is given for."""
    return [(sorted(listed), reason) for reason, listed in _MODEL_TYPES_BY_REASON.items()]
