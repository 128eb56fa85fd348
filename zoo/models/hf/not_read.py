"""Checkpoints that `zoo.load` does not read, and the reasons: its error gives them, and the page of families."""

from collections.abc import Mapping

_MODEL_TYPES_BY_REASON: Mapping[str, tuple[str, ...]] = {
    "tokens of its source that attend to all others, with projections of their own": ("led",),
    "attention with one matrix of queries, keys and values, and biases of queries and values only": ("deberta",),
    "its language model reads images by cross-attention": ("mllama",),
    "a mixture of experts that reads images": ("qwen3_vl_moe",),
    "a tower of images that no family here has": ("glm4v", "glm4v_moe"),
    "codes of sounds beside texts": ("qwen2_audio", "qwen2_5_omni", "qwen3_omni_moe"),
    "RWKV-5 has no class in transformers": ("rwkv5",),
}
_MODEL_TYPES_BY_NEAREST: Mapping[str, tuple[str, ...]] = {
    "bart": ("led",),
    "deberta-v2": ("deberta",),
    "glm4": ("glm4v",),
    "glm4_moe": ("glm4v_moe",),
    "llama": ("mllama",),
    "qwen2": ("qwen2_audio", "qwen2_5_omni"),
    "qwen3_moe": ("qwen3_omni_moe",),
    "qwen3_vl": ("qwen3_vl_moe",),
    "rwkv6": ("rwkv5",),
}
"""By a family that is read, the model types with most of its layers: names mislead, as BART and BERT."""
REFUSED_VARIANTS: Mapping[str, str] = {
    "DeBERTa v2 xlarge and xxlarge": "`conv_kernel_size`: a convolution beside the first layer.",
    "Marian with two vocabularies": "`share_encoder_decoder_embeddings`, `decoder_vocab_size`: two embeddings.",
}
"""Checkpoints of families that are read, and the keys of their configs that are refused by name."""


def find_reason(model_type: object) -> str | None:
    """Return the unsupported feature of a model, by its `model_type`; None for a type that is not listed."""
    return next((reason for reason, listed in _MODEL_TYPES_BY_REASON.items() if model_type in listed), None)


def find_nearest(model_type: object) -> str | None:
    """Return the family that is read and has most of the layers of a model that is not, by its `model_type`."""
    return next((nearest for nearest, listed in _MODEL_TYPES_BY_NEAREST.items() if model_type in listed), None)


def list_reasons() -> list[tuple[list[str], str]]:
    """Return the reasons, each after the `model_type`s that it is given for."""
    return [(sorted(listed), reason) for reason, listed in _MODEL_TYPES_BY_REASON.items()]
