"""Encoders of texts and images: BERT, vision Transformers and their kin, on the blocks and the stack of decoders."""

from .classification import classification_loss
from .heads import ClassificationHead, EncoderFeatures, FeatureHead, MaskedLMHead, TokenClassificationHead
from .image import ImageEncoder, build_image_encoder
from .relative import RelativeHidden
from .text import Encoder, build_encoder

__all__ = [
    "ClassificationHead",
    "Encoder",
    "EncoderFeatures",
    "FeatureHead",
    "ImageEncoder",
    "MaskedLMHead",
    "RelativeHidden",
    "TokenClassificationHead",
    "build_encoder",
    "build_image_encoder",
    "classification_loss",
]
