"""InternVL 3 (Zhu et al., arXiv:2504.10479): InternViT, four patches joined to one feature, and a language model."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import LayerNorm
from zoo.layers.encoders.projectors import MLPProjector
from zoo.models.hf import grammar as hf

from . import llava
from .internvl_layers import INTERNVL_VISION


def _build_internvl_projector(
    config: hf.Config, tower: hf.Config, text: hf.Config, *, key: Key[Array, ""]
) -> MLPProjector:
    """**Raises** `ConfigError` for a ratio that is not one over a whole number."""
    ratio = config["downsample_ratio"]
    merge = round(1 / ratio)
    if merge * ratio != 1:
        raise hf.ConfigError(f"downsample_ratio = {ratio} should be 1 over a whole number of patches")
    embed = text["hidden_size"]
    activation = hf.find_activation(config, "projector_hidden_act")
    norm = partial(LayerNorm, tower["hidden_size"] * merge**2, epsilon=1e-5)
    return MLPProjector(tower["hidden_size"], embed, embed, activation, norm=norm, merge=merge, key=key)


INTERNVL = hf.make_image_text_family(
    "internvl",
    "InternVLForConditionalGeneration",
    hf.ImageTextFacts(
        wrapper=hf.WRAPPERS["internvl"],
        towers={"internvl_vision": INTERNVL_VISION},
        projector=_build_internvl_projector,
        projector_names=lambda tower: {"layer_norm": "norm", **llava.PROJECTOR_NAMES},
        image_keys={"image_token_id": 151667},
        unread=llava.count_unread,
    ),
    defaults={
        "downsample_ratio": hf.Default(0.5, hf.POSITIVE_NUMBER),
        "projector_hidden_act": "gelu",
        "vision_feature_layer": hf.Default(-1, hf.integer()),
    },
    required_values={"vision_feature_select_strategy": ("default",)},
    ignored_keys=frozenset({"image_seq_length"}),
)
