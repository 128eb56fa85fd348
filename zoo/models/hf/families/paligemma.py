"""PaliGemma (Beyer et al., arXiv:2407.07726) and PaliGemma 2 (arXiv:2412.03555): SigLIP, a linear projector, and Gemma,
which sees images and question in both directions."""

from jaxtyping import Array, Key

from zoo.layers.encoders.projectors import LinearProjector
from zoo.models.hf import grammar as hf

from .siglip_vision_model import SIGLIP_VISION_MODEL


def _build_paligemma_projector(
    config: hf.Config, tower: hf.Config, text: hf.Config, *, key: Key[Array, ""]
) -> LinearProjector:
    return LinearProjector(tower["hidden_size"], text["hidden_size"], key=key)


PALIGEMMA = hf.make_image_text_family(
    "paligemma",
    "PaliGemmaForConditionalGeneration",
    hf.ImageTextFacts(
        wrapper=hf.Wrapper("gemma"),
        towers={"siglip_vision_model": SIGLIP_VISION_MODEL},
        projector=_build_paligemma_projector,
        projector_names=lambda tower: {"linear": "out"},
        image_keys={"image_token_index": 256000},
        places=lambda config: hf.PrefixSpan(),
        ignored_text_keys=("num_image_tokens", "use_bidirectional_attention"),
    ),
    ignored_keys=frozenset({"hidden_size", "projection_dim", "vocab_size", "ignore_index"}),
    ignored_tensors=SIGLIP_VISION_MODEL.ignored_tensors,
)
