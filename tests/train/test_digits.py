"""Scikit-learn's digits: both parts, the rows of each process, and what is said where the package is missing."""

import sys

import numpy as np
import pytest

from zoo.train.digits import LabeledImages, load_digits


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
