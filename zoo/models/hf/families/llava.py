"""LLaVA 1.5 (Liu et al., arXiv:2310.03744): CLIP's last layer but one, a projector of two layers, and a language
model."""

from typing import Any

from jaxtyping import Array, Key

from zoo.layers.encoders.projectors import MLPProjector
from zoo.models.hf import grammar as hf

from .clip_vision_model import CLIP_VISION_MODEL


def _build_llava_projector(
    config: hf.Config, tower: hf.Config, text: hf.Config, *, key: Key[Array, ""]
) -> MLPProjector:
    embed = text["hidden_size"]
    activation = hf.find_activation(config, "projector_hidden_act")
    bias = config["multimodal_projector_bias"]
    return MLPProjector(tower["hidden_size"], embed, embed, activation, bias=bias, key=key)


def count_unread(config: hf.Config) -> int:
    """Return the number of layers after the one that is read. **Raises** `ConfigError` for one that is counted from the
    first, or for several."""
    layer = config["vision_feature_layer"]
    if layer >= 0:
        raise hf.ConfigError(f"vision_feature_layer = {layer}: expected one that is counted from the last, such as -2")
    return -layer - 1


PROJECTOR_NAMES = {"linear_1": "up", "linear_2": "out"}
PROJECTOR_DEFAULTS: dict[str, Any] = {"projector_hidden_act": "gelu", "multimodal_projector_bias": True}

LLAVA = hf.make_image_text_family(
    "llava",
    "LlavaForConditionalGeneration",
    hf.ImageTextFacts(
        wrapper=hf.WRAPPERS["llava"],
        towers={"clip_vision_model": CLIP_VISION_MODEL},
        projector=_build_llava_projector,
        projector_names=lambda tower: PROJECTOR_NAMES,
        image_keys={"image_token_index": 32000},
        unread=count_unread,
    ),
    defaults={**PROJECTOR_DEFAULTS, "vision_feature_layer": hf.Default(-2, hf.integer())},
    required_values={"vision_feature_select_strategy": ("default",)},
    ignored_keys=frozenset({"image_seq_length", "vocab_size", "ignore_index"}),
    ignored_tensors=(r"embeddings\.position_ids$", r"rotary_emb\.inv_freq$"),
)
