"""Images for checkpoints: from pictures to the pixels that a model reads, and to the places that they have in texts."""

from .pictures import open_image, read_picture_size
from .placeholders import expand_placeholders
from .preprocess import make_image_processor, measure_images, preprocess_images, read_image_config
from .processed import ProcessedImages, join_rows

__all__ = [
    "ProcessedImages",
    "expand_placeholders",
    "join_rows",
    "make_image_processor",
    "measure_images",
    "open_image",
    "preprocess_images",
    "read_image_config",
    "read_picture_size",
]
