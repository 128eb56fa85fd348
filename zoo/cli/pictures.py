"""Pictures of a command line: files, as the images of a checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import zoo
from zoo.images.placeholders import expand_placeholders, find_placeholder, write_placeholders
from zoo.images.preprocess import preprocess_for_texts
from zoo.images.processed import ProcessedImages
from zoo.text.tokenizers import Tokenizer
from zoo.weights.resolve import open_checkpoint


class Pictures(NamedTuple):
    """Files, and what a model reads of them."""

    files: tuple[str, ...]
    config: dict[str, Any]
    """Settings of the checkpoint for pictures and their places."""
    processed: ProcessedImages
    images: Any
    """One row of images, as the model takes them."""

    def encode(self, prompt: str, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Tokenize a prompt of these pictures, which come first where it has no placeholder.

        **Raises** `ValueError` for another number of placeholders than of pictures.
        """
        if find_placeholder(self.config) not in prompt:
            prompt = write_placeholders(len(self.files), self.config) + prompt
        tokens = tokenizer.encode(expand_placeholders(prompt, self.processed, self.config)).tolist()
        if set(tokenizer.prefix) & set(tokens):  # PaliGemma's BOS is after the pictures
            return tuple(tokens)
        return (*tokenizer.prefix, *tokens)


def read_pictures(directory: Path, files: Sequence[str | Path]) -> Pictures | None:
    """Read files as a checkpoint reads pictures; None without any. Reads no weights.

    **Raises** `ValueError` for a model that reads texts only and for a file that is not an image, and `OSError` for one
    that cannot be read.
    """
    if not files:
        return None
    checkpoint = open_checkpoint(directory)
    if not isinstance(checkpoint.model, zoo.models.ImageText):
        raise ValueError(f"{files[0]}: {directory} is of the family {checkpoint.family.name}, which reads no pictures")
    names = tuple(str(Path(file).expanduser()) for file in files)
    config = zoo.images.read_image_config(directory)
    processed = preprocess_for_texts(names, config)
    return Pictures(names, config, processed, zoo.images.join_rows([processed]))
