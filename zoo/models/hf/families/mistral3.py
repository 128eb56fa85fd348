"""Mistral Small 3.1 (2025): Pixtral's encoder of images of any shape, 2 x 2 patches merged to one feature, and a
language model."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import RMSNorm
from zoo.layers.encoders.mergers import UnfoldingMerger
from zoo.models.hf import grammar as hf

from .pixtral_vision import PIXTRAL_VISION


def _build_mistral3_projector(
    config: hf.Config, tower: hf.Config, text: hf.Config, *, key: Key[Array, ""]
) -> UnfoldingMerger:
    norm = partial(RMSNorm, epsilon=text["rms_norm_eps"])
    options = {"merge": config["spatial_merge_size"], "bias": config["multimodal_projector_bias"]}
    activation = hf.find_activation(config, "projector_hidden_act")
    sizes = tower["hidden_size"], text["hidden_size"]
    return UnfoldingMerger(*sizes, norm, activation=activation, key=key, **options)


_PROJECTOR_NAMES: hf.NameMap = {
    "norm": "norm",
    "patch_merger.merging_layer": "merger",
    "linear_1": "up",
    "linear_2": "down",
}
MISTRAL3 = hf.make_image_text_family(
    "mistral3",
    "Mistral3ForConditionalGeneration",
    hf.ImageTextFacts(
        wrapper=hf.WRAPPERS["mistral3"],
        towers={"pixtral": PIXTRAL_VISION},
        projector=_build_mistral3_projector,
        projector_names=lambda tower: _PROJECTOR_NAMES,
        image_keys={"image_token_index": 10},
    ),
    defaults={"projector_hidden_act": "gelu", "multimodal_projector_bias": False, "spatial_merge_size": 2},
    required_values={"vision_feature_layer": (-1,)},
)
