"""Images for checkpoints: from pictures to the pixels that a model reads."""

from .preprocess import make_image_processor, preprocess_images

__all__ = ["make_image_processor", "preprocess_images"]
