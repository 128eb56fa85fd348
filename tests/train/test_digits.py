"""Scikit-learn's digits: both parts, the rows of each process, and what is said where the package is missing."""

import sys

import numpy as np
import pytest

from zoo.images import open_image
from zoo.train.digits import LabeledImages, list_digit_questions, load_digits


def test_digits_are_split_by_the_seed():
    training, test = load_digits(held_out=400)
    assert (len(training), len(test), training.classes) == (1397, 400, 10)
    example = training[3]
    assert example["images"].shape == (1, 8, 8) and example["images"].dtype == np.float32
    assert -1 == training.images.min() and training.images.max() == 1
    again, other = load_digits(held_out=400)[0], load_digits(held_out=400, seed=1)[0]
    assert training.digest == again.digest != other.digest


def test_rows_of_processes_are_contiguous():
    images = LabeledImages(np.arange(6.0).reshape(6, 1, 1, 1), np.arange(6))
    parts = [images.take_rows((index, 3))["labels"].tolist() for index in range(3)]
    assert parts == [[0, 1], [2, 3], [4, 5]]
    assert images.take_rows()["images"].ravel().tolist() == [*range(6)]


def test_digits_refuse_natural_mistakes(monkeypatch):
    with pytest.raises(ValueError, match="6 images do not divide evenly over 4 processes"):
        LabeledImages(np.zeros((6, 1, 1, 1)), np.zeros(6, int)).take_rows((0, 4))
    with pytest.raises(ValueError, match="6 images have as many labels, not 5"):
        LabeledImages(np.zeros((6, 1, 1, 1)), np.zeros(5, int))
    with pytest.raises(ValueError, match="1 to 1796 can be held out, not 1797"):
        load_digits(held_out=1797)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'equizoo\[images\]'"):
        load_digits()


def test_questions_have_their_answers_in_the_picture():
    """Of one scan of each digit, as which each quarter of a picture is found again."""
    labels = np.arange(10)
    scans = np.random.default_rng(0).uniform(-1, 1, (10, 1, 8, 8)).astype(np.float32)
    records = list_digit_questions(LabeledImages(scans, labels), 60)
    known = np.round((scans[:, 0] + 1) * 127.5)
    asked = set()
    for record in records:
        (picture, question), answer = (message["content"] for message in record["messages"])
        gray = open_image(picture["bytes"])[..., 0].astype(int)
        parts = {"top left": gray[:8, :8], "top right": gray[:8, 8:]}
        parts |= {"bottom left": gray[8:, :8], "bottom right": gray[8:, 8:]}
        seen = {name: int(np.abs(known - part).sum((1, 2)).argmin()) for name, part in parts.items()}
        seen |= {"the largest": max(seen.values()), "the smallest": min(seen.values())}
        name = question["text"].removeprefix("Which digit is ").removesuffix("?")
        assert answer == str(seen[name])
        asked.add(name)
    assert asked == {*parts, "the largest", "the smallest"}
    assert records == list_digit_questions(LabeledImages(scans, labels), 60)
    assert records != list_digit_questions(LabeledImages(scans, labels), 60, seed=1)
