"""Chinese CLIP (Yang et al., arXiv:2211.01335): BERT, pooled at its first token, and CLIP's encoder of images."""

from jaxtyping import Array, Key

from zoo.layers.encoders.pooling import ClassTokenPooler
from zoo.models.hf import grammar as hf

from . import bert
from .clip_vision_model import CLIP_VISION_MODEL


def _build_text(config: hf.Config, *, key: Key[Array, ""]) -> hf.Encoder:
    heads = {"Model": hf.make_feature_head_factory(lambda key: ClassTokenPooler())}
    positions = config["max_position_embeddings"]
    return bert.build_bert_layers(config, "ChineseCLIPText", heads, positions=positions, key=key)


_TEXT = hf.Family(
    name="chinese_clip_text_model",
    architecture="ChineseCLIPTextModel",
    build=_build_text,
    names=lambda config: bert.map_bert_layers("text_model"),
    defaults=hf.omit(bert.BERT.declared, *hf.LABEL_KEYS),
    required_values=hf.ONLY_ENCODERS,
    ignored_keys=frozenset(
        """
        directionality output_past pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head
        pooler_type tie_word_embeddings
        """.split()
    ),
)

CHINESE_CLIP = hf.make_tower_family("chinese_clip", "ChineseCLIPModel", _TEXT, CLIP_VISION_MODEL, projected=True)
