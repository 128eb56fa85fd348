"""A language model that reads images, initialized from scratch."""

import dataclasses
import json
from typing import Any

from jaxtyping import Array, Key

from zoo._keywords import check_keywords

from ..hf.config import read_config
from ..hf.families import FAMILIES
from ..hf.spec import Origin
from ..image_text import ImageText


@check_keywords
def LLaVA(
    *,
    vocab: int,
    length: int,
    image_token: int,
    image_size: int,
    patch_size: int,
    channels: int = 3,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    key: Key[Array, ""],
) -> ImageText:
    """Build LLaVA (Liu et al., arXiv:2310.03744): the image tower of CLIP, a projector of two layers and the decoder of
    LLaMA. Tower and decoder have equal sizes.

    - `vocab`, `length`: token ids, and the most tokens of a text with its images.
    - `image_token`: the id that stands for each patch of an image in the text.
    - `image_size`, `patch_size`: of square images, in pixels. `channels` of a pixel.
    - `embed`, `layers`, `heads`, `mlp`: of tower and decoder, as for `Transformer`.

    All layers of the tower are read; LLaVA 1.5 skips the last. `zoo.save` writes it as LlavaForConditionalGeneration of
    transformers, and `zoo.cross_entropy` trains it.

    **Raises** `ValueError` for sizes that do not fit together, and for an image token outside the vocabulary.
    """
    if not 0 <= image_token < vocab:
        raise ValueError(f"image_token={image_token} is not one of {vocab} token ids")
    sizes = {
        "hidden_size": embed,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": mlp,
    }
    text = {"model_type": "llama", "vocab_size": vocab, "max_position_embeddings": length}
    image = {"model_type": "clip_vision_model", "image_size": image_size, "patch_size": patch_size}
    family = FAMILIES["llava"]
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "image_token_index": image_token,
        "image_seq_length": (image_size // patch_size) ** 2,
        "vision_feature_layer": -1,
        "text_config": {**sizes, **text},
        "vision_config": {**sizes, **image, "num_channels": channels},
    }
    model = family.build(read_config(family, config, ignore=None), key=key)
    return dataclasses.replace(model, origin=Origin(family, json.dumps(config)))
