"""Labeled images, the handwritten digits that come with scikit-learn, and questions about pictures of these."""

import hashlib
import io
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped

from zoo._optional import import_optional

_PLACES = ("top left", "top right", "bottom left", "bottom right")


class LabeledImages:
    """A dataset of images and their classes. An example is `{"images": "channels height width", "labels": ""}`, the
    names that `zoo.models.classification_loss` reads."""

    def __init__(self, images: Float[np.ndarray, "rows channels height width"], labels: Int[np.ndarray, "_"]):
        """**Raises** `ValueError` unless there are as many labels as images."""
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images have as many labels, not {len(labels)}")
        self.images = images.astype(np.float32)
        self.labels = labels.astype(np.int32)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Shaped[np.ndarray, "..."]]:
        return {"images": self.images[index], "labels": self.labels[index]}

    def take_rows(self, process: tuple[int, int] = (0, 1)) -> dict[str, Shaped[np.ndarray, "batch ..."]]:
        """Return all images as one batch; of several processes (`zoo.parallel.reader`), the rows of this one.

        **Raises** `ValueError` if the processes do not divide the rows.
        """
        index, count = process
        size, remainder = divmod(len(self), count)
        if remainder:
            raise ValueError(f"{len(self)} images do not divide evenly over {count} processes: use a multiple")
        rows = slice(index * size, (index + 1) * size)
        return {"images": self.images[rows], "labels": self.labels[rows]}

    @property
    def classes(self) -> int:
        """Number of classes, 0 to the largest label."""
        return int(self.labels.max()) + 1

    @property
    def digest(self) -> str:
        """Hash of all images and labels; `Run.restore` compares it to tell whether the data are the same."""
        return hashlib.sha256(self.images.tobytes() + self.labels.tobytes()).hexdigest()[:16]


def load_digits(*, held_out: int = 384, seed: int = 0) -> tuple[LabeledImages, LabeledImages]:
    """Return scikit-learn's 1,797 handwritten digits, for training and held out: 8 x 8 pixels in [-1, 1], one channel,
    ten classes (Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository,
    1998).

    `seed` shuffles them before the last `held_out` are set aside.

    **Raises** `ImportError` without scikit-learn, with the command that installs it; `ValueError` unless some images
    remain for both.
    """
    bundled = import_optional("sklearn.datasets", "pip install 'equizoo[images]'").load_digits()
    count = len(bundled.target)
    if not 0 < held_out < count:
        raise ValueError(f"of {count} images 1 to {count - 1} can be held out, not {held_out}")
    order = np.random.default_rng(seed).permutation(count)
    images = bundled.images[order, None] / 8 - 1
    labels = bundled.target[order]
    return LabeledImages(images[:-held_out], labels[:-held_out]), LabeledImages(images[-held_out:], labels[-held_out:])


def list_digit_questions(digits: LabeledImages, count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return chats, each of a question about a picture of four digits, two by two, and its answer: records for
    `zoo.train.load_records` with `images`.

    Questions ask for the digit at one of the four places, for the largest and for the smallest, a third each. Pictures
    are PNG of 16 x 16 pixels.

    **Raises** `ImportError` without Pillow, with the command that installs it.
    """
    pillow = import_optional("PIL.Image", "pip install 'equizoo[images]'")
    rng = np.random.default_rng(seed)
    records = []
    for _ in range(count):
        drawn = rng.integers(len(digits), size=4)
        scans = (digits.images[drawn, 0] + 1) * 127.5
        labels = digits.labels[drawn]
        place = rng.integers(4)
        asked = {_PLACES[place]: labels[place], "largest": labels.max(), "smallest": labels.min()}
        word = rng.choice(list(asked))
        file = io.BytesIO()
        pixels = np.block([[scans[0], scans[1]], [scans[2], scans[3]]])
        pillow.fromarray(pixels.round().astype(np.uint8)).save(file, "png")
        question = f"Which digit is {'' if word in _PLACES else 'the '}{word}?"
        content = [{"type": "image", "bytes": file.getvalue()}, {"type": "text", "text": question}]
        answer = {"role": "assistant", "content": str(asked[word])}
        records.append({"messages": [{"role": "user", "content": content}, answer]})
    return records
