"""Heads of vision Transformers: the class of an image, or its features."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.layers import AbstractImagePooler, AbstractLinear, Linear
from zoo.parallel import Dim, Module
from zoo.shapes import HiddenStates


class AbstractImageHead(Module):
    """Head of a vision Transformer, after the final norm: `tokens -> result`."""

    @abc.abstractmethod
    def __call__(self, x: HiddenStates) -> Any:
        """Return logits or features of each image."""


def take_class_token(x: HiddenStates) -> Float[Array, "batch _"]:
    """Return the class token, which is the first."""
    return x[:, 0]


def join_class_and_mean(x: HiddenStates) -> Float[Array, "batch _"]:
    """Return the class token and the mean of all others, one after the other, as DINOv2's classifiers read them."""
    return jnp.concatenate([x[:, 0], x[:, 1:].mean(1)], axis=-1)


class ClassificationHead(AbstractImageHead):
    """Logits of classes: W pool(x) + b."""

    linear: AbstractLinear

    pool: Callable = eqx.field(static=True)

    def __init__(self, size: int, classes: int, *, pool: Callable = take_class_token, key: Key[Array, ""]):
        """- `size`: features of the pooled tokens.
        - `pool`: a function from "batch seq embed" to "batch size"."""
        self.linear, self.pool = Linear(size, classes, out=Dim("classes"), bias=True, key=key), pool

    def __call__(self, x: HiddenStates) -> Float[Array, "batch classes"]:
        return self.linear(self.pool(x))


class ImageFeatures(Module):
    """Features of images, as transformers names them."""

    last_hidden_state: Float[Array, "batch seq embed"]
    """Every token after the final norm."""
    pooler_output: Float[Array, "batch features"] | None
    """One vector per image; None from a model without a pooler."""


class FeatureHead(AbstractImageHead):
    """Features: all tokens, and those that a `pooler` makes of them."""

    pooler: AbstractImagePooler | None

    def __call__(self, x: HiddenStates) -> ImageFeatures:
        return ImageFeatures(x, None if self.pooler is None else self.pooler(x))
