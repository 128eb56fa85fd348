"""Gemma 4 (Gemma team, 2026): an encoder of images of any shape, squares of patches pooled to one feature, and the
language model `gemma4_text`, in larger models with images that see themselves in layers with a window."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import RMSNorm
from zoo.layers.encoders.mergers import MeanMerger
from zoo.models.hf import grammar as hf

from . import gemma4_vision
from .gemma4_text import GEMMA4_TEXT


def build_gemma4_projector(config: hf.Config, tower: hf.Config, text: hf.Config, *, key: Key[Array, ""]) -> MeanMerger:
    """Build the projector from pooled features of images to embeddings."""
    norm = partial(RMSNorm, epsilon=tower["rms_norm_eps"], scaled=False)
    sizes = tower["hidden_size"], text["hidden_size"]
    return MeanMerger(*sizes, norm, merge=tower["pooling_kernel_size"], key=key)


def _find_places(config: hf.Config) -> hf.CausalPlaces | hf.ImageSpans:
    """**Raises** `ConfigError` for another mask than the two of Gemma 4."""
    mask = (config["text_config"] or {}).get("use_bidirectional_attention")
    if mask not in (None, "vision"):
        raise hf.ConfigError(f"use_bidirectional_attention = {mask!r}, and it is 'vision' or null here")
    return hf.CausalPlaces() if mask is None else hf.ImageSpans()


GEMMA4 = hf.make_image_text_family(
    "gemma4",
    "Gemma4ForConditionalGeneration",
    hf.ImageTextFacts(
        wrapper=hf.WRAPPERS["gemma4"],
        towers={"gemma4_vision": gemma4_vision.GEMMA4_VISION},
        projector=build_gemma4_projector,
        projector_names=lambda tower: {"embedding_projection": "projection"},
        image_keys={"image_token_id": 258880},
        places=_find_places,
        ignored_text_keys=("use_bidirectional_attention",),
    ),
    prefixes=(hf.Prefixes("model.language_model.", "model.vision_tower", "model.embed_vision"),),
    ignored_keys=frozenset(
        {"audio_config", "audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_id", "eoa_token_index"}
        | {"eoi_token_id", "video_token_id", "vision_soft_tokens_per_image"}
    ),
    other_modules=(r"^model\.(audio_tower|embed_audio)\.", *GEMMA4_TEXT.other_modules),
)
