"""Heads of encoders: logits of classes or of masked tokens, or features."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.layers import AbstractLinear, AbstractNorm, Linear
from zoo.layers.embedding import AbstractEmbedding
from zoo.layers.encoders.pooling import AbstractPooler, take_first_token
from zoo.parallel import Dim, Module
from zoo.shapes import HiddenStates, PaddingMask


class AbstractEncoderHead(Module):
    """Head of an encoder, after the final norm: `(x, mask) -> result`. The `mask` is False for padding; None without
    any, as for images."""

    @abc.abstractmethod
    def __call__(self, x: HiddenStates, mask: PaddingMask | None = None) -> Any:
        """Return logits or features of each row, or of each token."""


def average_tokens(x: HiddenStates, mask: PaddingMask | None = None) -> Float[Array, "batch _"]:
    """Return the mean of all tokens that are not padding."""
    if mask is None:
        return x.mean(1)
    weights = mask[..., None].astype(x.dtype)
    return (x * weights).sum(1) / weights.sum(1)


def join_class_and_mean(x: HiddenStates, mask: None = None) -> Float[Array, "batch _"]:
    """Return the class token and the mean of all others, one after the other, as DINOv2's classifiers read them."""
    return jnp.concatenate([x[:, 0], x[:, 1:].mean(1)], axis=-1)


class DenseTransform(Module):
    """norm(activation(W x + b)), of each token or of a pooled one: the dense layer of BERT's heads. The norm is
    optional, and so is another number of features than `x` has."""

    linear: AbstractLinear
    norm: AbstractNorm | None

    activation: Callable = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        *,
        size: int | None = None,
        activation: Callable,
        norm: Callable[[], AbstractNorm] | None = None,
        bias: bool = True,
        key: Key[Array, ""],
    ):
        """`size`: features of the result, `embed` by default. `norm`: factory of the norm."""
        self.linear = Linear(embed, embed if size is None else size, in_=Dim("embed"), bias=bias, key=key)
        self.norm = None if norm is None else norm()
        self.activation = activation

    def __call__(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows _"]:
        x = self.activation(self.linear(x))
        if self.norm is None:
            return x
        return self.norm(x)


class ClassificationHead(AbstractEncoderHead):
    """Logits of the classes of a row: W transform(pool(x)) + b. The transform is optional."""

    linear: AbstractLinear
    transform: DenseTransform | None

    pool: Callable = eqx.field(static=True)

    def __init__(
        self,
        size: int,
        classes: int,
        *,
        pool: Callable = take_first_token,
        transform: Callable[..., DenseTransform] | None = None,
        key: Key[Array, ""],
    ):
        """- `size`: features of the pooled tokens.
        - `pool`: a function from "batch seq embed" and a padding mask to "batch size".
        - `transform`: factory of the transform, called with `key=`."""
        key, transform_key = jax.random.split(key)
        self.linear = Linear(size, classes, out=Dim("classes"), bias=True, key=key)
        self.pool = pool
        self.transform = None if transform is None else transform(key=transform_key)

    def __call__(self, x: HiddenStates, mask: PaddingMask | None = None) -> Float[Array, "batch classes"]:
        pooled = self.pool(x, mask)
        if self.transform is not None:
            pooled = self.transform(pooled)
        return self.linear(pooled)


class TokenClassificationHead(AbstractEncoderHead):
    """Logits of the classes of each token: W transform(x) + b. The transform is optional."""

    linear: AbstractLinear
    transform: DenseTransform | None

    def __init__(
        self, size: int, classes: int, *, transform: Callable[..., DenseTransform] | None = None, key: Key[Array, ""]
    ):
        """`transform`: factory of the transform, called with `key=`."""
        key, transform_key = jax.random.split(key)
        self.linear = Linear(size, classes, out=Dim("classes"), bias=True, key=key)
        self.transform = None if transform is None else transform(key=transform_key)

    def __call__(self, x: HiddenStates, mask: PaddingMask | None = None) -> Float[Array, "batch seq classes"]:
        if self.transform is not None:
            x = self.transform(x)
        return self.linear(x)


class LateClassificationHead(AbstractEncoderHead):
    """Logits of the classes of a row: the mean over tokens of W transform(x) + b (EuroBERT, arXiv:2503.05500)."""

    tokens: TokenClassificationHead

    def __call__(self, x: HiddenStates, mask: PaddingMask | None = None) -> Float[Array, "batch classes"]:
        return average_tokens(self.tokens(x), mask)


class ReplacedTokenHead(AbstractEncoderHead):
    """Logit of each token: was it replaced? The head of ELECTRA's discriminator (Clark et al., arXiv:2003.10555,
    section 2)."""

    tokens: TokenClassificationHead
    """Head with one class."""

    def __call__(self, x: HiddenStates, mask: PaddingMask | None = None) -> Float[Array, "batch seq"]:
        return self.tokens(x)[..., 0]


class MaskedLMHead(Module):
    """Logits of the vocabulary at every token: W transform(x) + b, for masked language modeling (Devlin et al.,
    arXiv:1810.04805, section 3.1). Without a `decoder`, W is the embedding. Transform and bias are optional."""

    transform: DenseTransform | None
    decoder: AbstractLinear | None
    bias: Float[Array, "vocab"] | None

    def __init__(
        self,
        embed: int,
        vocab: int,
        *,
        transform: Callable[..., DenseTransform] | None = None,
        tied: bool = True,
        bias: bool = True,
        key: Key[Array, ""],
    ):
        """- `transform`: factory of the transform, called with `key=`.
        - `tied`: use the embedding as W."""
        key, transform_key = jax.random.split(key)
        self.transform = None if transform is None else transform(key=transform_key)
        if tied:
            self.decoder = None
        else:
            self.decoder = Linear(embed, vocab, in_=Dim("embed"), out=Dim("vocab"), key=key)
        self.bias = jnp.zeros(vocab, jnp.float32) if bias else None


class MaskedUnembedding(Module):
    """Hidden states to logits: a `MaskedLMHead` with the matrix that it multiplies by."""

    head: MaskedLMHead
    table: AbstractLinear | AbstractEmbedding

    def __call__(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        if self.head.transform is not None:
            x = self.head.transform(x)
        if isinstance(self.table, AbstractEmbedding):
            logits = self.table.transposed(x)
        else:
            logits = self.table(x)
        if self.head.bias is None:
            return logits
        return logits + self.head.bias


class EncoderFeatures(Module):
    """Features of images or texts, as transformers names them."""

    last_hidden_state: Float[Array, "batch seq embed"]
    """Every token after the final norm."""
    pooler_output: Float[Array, "batch features"] | None
    """One vector per row; None from a model without a pooler."""


class FeatureHead(AbstractEncoderHead):
    """Features of all tokens, and a pooled vector per row if there is a `pooler`."""

    pooler: AbstractPooler | None

    def __call__(self, x: HiddenStates, mask: PaddingMask | None = None) -> EncoderFeatures:
        pooled = None if self.pooler is None else self.pooler(x, mask)
        return EncoderFeatures(x, pooled)


def make_feature_head(key: Key[Array, ""]) -> FeatureHead:
    """Make a `FeatureHead` without a pooler. A factory, as `build_encoder` takes one."""
    return FeatureHead(None)
