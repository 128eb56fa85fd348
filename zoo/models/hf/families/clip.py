"""CLIP (Radford et al., arXiv:2103.00020): an encoder of texts and one of images, projected into one space, and a
softmax loss."""

from zoo.models.hf import grammar as hf

from .clip_text_model import CLIP_TEXT_MODEL
from .clip_vision_model import CLIP_VISION_MODEL

CLIP = hf.make_tower_family("clip", "CLIPModel", CLIP_TEXT_MODEL, CLIP_VISION_MODEL, projected=True)
