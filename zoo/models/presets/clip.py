"""Two towers for images and their texts, initialized from scratch."""

import dataclasses
import json
from typing import Any

from jaxtyping import Array, Key

from zoo._keywords import check_keywords

from ..encoders.towers import TwoTowers
from ..hf.config import read_config
from ..hf.families import FAMILIES
from ..hf.spec import Origin


@check_keywords
def CLIP(
    *,
    vocab: int,
    length: int,
    end_token: int,
    image_size: int,
    patch_size: int,
    channels: int = 3,
    features: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    key: Key[Array, ""],
) -> TwoTowers:
    """Build CLIP (Radford et al., arXiv:2103.00020) with towers of equal sizes.

    - `vocab`, `length`: token ids, and the most tokens of a text, which `end_token` ends: it is pooled there.
    - `image_size`, `patch_size`: of square images, in pixels. `channels` of a pixel.
    - `features`: of the space in which texts and images are compared.
    - `embed`, `layers`, `heads`, `mlp`: of each tower, as for `Transformer`.

    `zoo.save` writes it as CLIPModel of transformers. `zoo.models.contrastive_loss` trains it.

    **Raises** `ValueError` for sizes that do not fit together, and for the end token 2, which in CLIP's files stands
    for the highest id of a text.
    """
    if end_token == 2:
        raise ValueError(
            "end_token=2 stands for the highest id of a text in CLIP's files: give the end token another id"
        )
    sizes = {
        "hidden_size": embed,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": mlp,
    }
    text = {"vocab_size": vocab, "max_position_embeddings": length, "eos_token_id": end_token}
    image = {"image_size": image_size, "patch_size": patch_size, "num_channels": channels}
    family = FAMILIES["clip"]
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "projection_dim": features,
        "text_config": {**sizes, **text},
        "vision_config": {**sizes, **image},
    }
    model = family.build(read_config(family, config, ignore=None), key=key)
    return dataclasses.replace(model, origin=Origin(family, json.dumps(config)))
