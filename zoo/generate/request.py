"""Check the arguments of `generate`, and convert its options of sampling to arrays."""

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, TypedDict

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from zoo._checks import check_mask, check_not_donated, check_tokens, is_host_readable
from zoo.models import Decoder, ImageText
from zoo.models.cross_blocks import SourceInputs
from zoo.parallel import Mesh, Module, leaves
from zoo.parallel.mesh import check_placed, require_mesh
from zoo.parallel.place import place

_Number = float | int


class DecodedText(Module):
    """The text so far, for a function of logits (`logits=` of `zoo.generate`)."""

    tokens: Int[Array, "batch text"]
    """Token ids of each row by position, of prefix, prompt and new tokens; -1 after the latest. There are as many
    columns as the KV caches have slots."""
    lengths: Int[Array, "batch"]
    """Number of tokens of each row."""
    prompt_lengths: Int[Array, "batch"]
    """Number of tokens of each row before the first new one."""


LogitsFunction = Callable[[Float[Array, "batch vocab"], DecodedText], Float[Array, "batch vocab"]]
"""A function of logits and the text before them that returns other logits."""


class SharedOptions(TypedDict, total=False):
    """Options of sampling that all rows of a batch share."""

    top_k: int | None
    top_p: _Number | None
    min_p: _Number | None
    repetition_penalty: _Number | None
    presence_penalty: _Number | None
    frequency_penalty: _Number | None
    logits: LogitsFunction | None
    stop_tokens: Sequence[int]
    stop_sequences: Sequence[Sequence[int]]


class SamplingOptions(SharedOptions, total=False):
    """Options of sampling as keywords, for type checkers: the fields of `Sampling`."""

    temperature: _Number


TRUNCATIONS = ("top_k", "top_p", "min_p")
"""Options that are for a temperature above 0."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Checked options of sampling: how tokens are drawn, and which ones end a row. `zoo.generate` explains each.

    **Raises** `TypeError` for a `top_k` or stop tokens that are not integers and for a function of logits that is not
    callable or not hashable, and `ValueError` for the first option that is out of its range, by name.
    `check_temperature` checks the temperature, which needs a key.
    """

    temperature: _Number = 0.0
    top_k: int | None = None
    top_p: _Number | None = None
    min_p: _Number | None = None
    repetition_penalty: _Number | None = None
    presence_penalty: _Number | None = None
    frequency_penalty: _Number | None = None
    logits: LogitsFunction | None = None
    stop_tokens: Sequence[int] = ()
    stop_sequences: Sequence[Sequence[int]] = ()

    def __post_init__(self):
        if self.top_k is not None:
            _check_integer("top_k", self.top_k)
        if not self.temperature and (unused := [name for name in TRUNCATIONS if getattr(self, name) is not None]):
            raise ValueError(f"{unused[0]} needs sampling, and temperature=0 is greedy: give a temperature above 0")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k keeps at least 1 token, not {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is above 0 and at most 1, not {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is at least 0 and at most 1, not {self.min_p}")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty is above 0, 1 changing nothing, not {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            if penalty is not None and not math.isfinite(penalty):
                raise ValueError(f"{name} is a finite number, 0 changing nothing, not {penalty}")
        _check_function(self.logits)
        object.__setattr__(self, "stop_tokens", _read_stop_tokens(self.stop_tokens))
        object.__setattr__(self, "stop_sequences", _read_stop_sequences(self.stop_sequences))


class DecodeOptions(Module):
    """Options of the decoding loop. Those of sampling are arrays, with a neutral value where one is not set, so that
    neither setting nor changing one recompiles."""

    temperature: Float[Array, ""]
    """0 for greedy decoding."""
    top_k: Int[Array, ""]
    """At most the size of the vocabulary, which keeps every token."""
    top_p: Float[Array, ""]
    """1 keeps every token."""
    min_p: Float[Array, ""]
    """0 keeps every token."""
    repetition_penalty: Float[Array, ""]
    """1 changes nothing."""
    is_stop: Bool[Array, "classes"]
    """True for token ids that end a row."""

    presence_penalty: Float[Array, ""] | None = None
    """None, and then nothing is counted, if neither this nor `frequency_penalty` is set."""
    frequency_penalty: Float[Array, ""] | None = None
    stop_sequences: Int[Array, "stops text"] | None = None
    """Token sequences that end a row, padded with -1 on the left."""
    adjust: LogitsFunction | None = eqx.field(static=True, default=None)
    """A function of logits, traced into the program."""
    details: bool = eqx.field(static=True, default=False)
    """True to record log-probabilities and the text."""
    keeps_text: bool = eqx.field(static=True, default=False)
    """True to record the text for a draft."""
    capture: tuple[str, ...] = eqx.field(static=True, default=())
    """Names of values to record (`zoo.capture`)."""

    @property
    def needs_text(self) -> bool:
        """True for options that need the text so far."""
        return self.details or self.keeps_text or self.adjust is not None or self.stop_sequences is not None

    @classmethod
    def of(
        cls,
        sampling: Sampling,
        vocab: int,
        mesh: Mesh | None = None,
        *,
        details: bool = False,
        keeps_text: bool = False,
        capture: tuple[str, ...] = (),
    ) -> "DecodeOptions":
        """Convert options of sampling to arrays, on `mesh`. **Raises** `ValueError` for a stop token outside the
        vocabulary."""
        stops = {"stop_tokens": [sampling.stop_tokens], "stop_sequences": sampling.stop_sequences}
        for name, sequences in stops.items():
            if outside := [token for tokens in sequences for token in tokens if not 0 <= token < vocab]:
                raise ValueError(f"{name}: {outside[0]} is outside the vocabulary of {vocab} tokens")
        is_stop = np.zeros(vocab, bool)
        is_stop[list(sampling.stop_tokens)] = True
        # From NumPy: `jnp.asarray` would compile a program for each dtype and shape.
        arrays: dict[str, Any] = {
            "temperature": np.float32(sampling.temperature),
            "top_k": np.int32(min(sampling.top_k or vocab, vocab)),
            "top_p": np.float32(sampling.top_p or 1),
            "min_p": np.float32(sampling.min_p or 0),
            "repetition_penalty": np.float32(sampling.repetition_penalty or 1),
            "is_stop": is_stop,
        }
        if sampling.presence_penalty is not None or sampling.frequency_penalty is not None:
            arrays["presence_penalty"] = np.float32(sampling.presence_penalty or 0)
            arrays["frequency_penalty"] = np.float32(sampling.frequency_penalty or 0)
        if sampling.stop_sequences:
            width = max(map(len, sampling.stop_sequences))
            padded = [[-1] * (width - len(row)) + list(row) for row in sampling.stop_sequences]
            arrays["stop_sequences"] = np.asarray(padded, np.int32)
        statics = {"adjust": sampling.logits, "details": details, "keeps_text": keeps_text, "capture": capture}
        options = cls(**jax.device_put(arrays), **statics)
        return options if mesh is None else place(options, mesh)  # once, not at every step


def check_temperature(temperature: _Number, key: Key[Array, ""] | None) -> None:
    """**Raises** `ValueError` for a temperature out of its range, or above 0 without a key."""
    if not 0 <= temperature < math.inf or (temperature > 0 and key is None):
        raise ValueError(f"temperature={temperature} needs to be 0, or above 0 with a key to sample with")


def check_count(name: str, count: Any) -> None:
    """**Raises** `TypeError` for a count that is not an integer, and `ValueError` for one below 1."""
    _check_integer(name, count)
    if count < 1:
        raise ValueError(f"generate needs {name} of at least 1, not {count}")


def _check_integer(name: str, x: Any) -> None:
    if isinstance(x, bool) or not isinstance(x, Integral):
        raise TypeError(f"{name} is an integer, not {x!r}")


def _check_function(logits: Any) -> None:
    if logits is None:
        return
    if not callable(logits):
        raise TypeError(f"logits is a function of logits and the text so far, not {logits!r}")
    try:
        hash(logits)
    except TypeError:
        raise TypeError(
            f"logits: {type(logits).__name__} cannot be hashed, and the function is part of the compiled program's "
            "key. Pass a function of a module, or functools.partial of hashable values"
        ) from None


def _read_stop_tokens(stop_tokens: Sequence[int]) -> tuple[int, ...]:
    """Return stop tokens as a tuple. **Raises** `TypeError` for anything but a sequence of integers."""
    try:
        return tuple(operator.index(token) for token in stop_tokens)
    except TypeError:
        raise TypeError(f"stop_tokens is a sequence of token ids, such as (7,), not {stop_tokens!r}") from None


def _read_stop_sequences(stop_sequences: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return stop sequences as tuples. **Raises** `TypeError` for anything but a sequence of sequences of integers, and
    `ValueError` for an empty one."""
    try:
        sequences = tuple(tuple(operator.index(token) for token in tokens) for tokens in stop_sequences)
    except TypeError:
        raise TypeError(
            f"stop_sequences is a sequence of sequences of token ids, such as ((13, 13),), not {stop_sequences!r}"
        ) from None
    if not all(sequences):
        raise ValueError("stop_sequences holds an empty sequence, which every text ends with")
    return sequences


def describe_non_finite(subject: str, count: int) -> str:
    """Return the message for logits that are not finite."""
    return (
        f"{subject} are not finite after {count} new tokens: look for NaN in the model's parameters (zoo.inspect), or "
        "compute in another dtype"
    )


def check_decoder(model: Any, name: str = "text is generated by a Decoder, not by") -> None:
    """**Raises** `TypeError` for a model that is not a decoder, and for the decoder of one source."""
    if not isinstance(model, Decoder):
        advice = ": model.decoder is its Decoder of texts" if isinstance(model, ImageText) else ""
        raise TypeError(f"{name} {type(model).__name__}{advice}")
    if isinstance(model.layer_inputs, SourceInputs):
        raise TypeError(
            "targets of a source are generated by the whole model, which reads it: zoo.generate(model, source)"
        )


def refuse_beside_source(prefix: Any, draft: Any) -> None:
    """**Raises** `ValueError` for what an encoder-decoder does not take besides a source."""
    for name, given in {"prefix": prefix, "draft": draft}.items():
        if given is not None:
            raise ValueError(f"{name}: the target of a source begins with the start token, and has none: leave it out")


def refuse_beside_images(prefix: Any, draft: Any, capture: Sequence[str]) -> None:
    """**Raises** `ValueError` and `NotImplementedError` for what a prompt that is read in one piece, as one with images
    is, does not take besides."""
    if prefix is not None:
        raise ValueError(
            "prefix: the prompt of this model is read in one piece, from its beginning with its images: leave it out"
        )
    if draft is not None or capture:
        name = "capture" if draft is None else "draft"
        raise NotImplementedError(
            f"{name}: the first token comes with a prompt that is read in one piece, as one with images: leave it out"
        )


def check_prompt(
    tokens: Int[Array, "batch seq"] | Int[np.ndarray, "batch seq"], mask: Bool[Array, "batch seq"] | None, vocab: int
) -> None:
    """Check the shape of a prompt, and its values unless they are traced or on other processes.

    **Raises** `TypeError` for a prompt that is not of integers, and `ValueError` for one that is not "batch seq" or is
    empty, padding that is not on the left, a row without a real token, and an id outside the vocabulary.
    """
    check_tokens(tokens, name="the prompt")
    if 0 in tokens.shape:
        raise ValueError(f"generate needs a prompt of at least 1 row and 1 token: {tokens.shape}")
    is_real = np.ones(tokens.shape, bool)
    if mask is not None:
        check_mask(mask, tokens)
    if mask is not None and is_host_readable(mask):
        is_real = np.asarray(jax.device_get(mask)).astype(bool)
        if len(empty := np.flatnonzero(~is_real.any(1))):
            raise ValueError(f"row {empty[0]} of the prompt has no real token: mask is False everywhere")
        if len(rows := np.flatnonzero((is_real[:, :-1] & ~is_real[:, 1:]).any(1))):
            raise ValueError(
                f"prompts are padded on the left: after the first real token of a row all are real, and in row "
                f"{rows[0]} of mask they are not"
            )
    if is_host_readable(tokens) and (mask is None or is_host_readable(mask)):
        ids = np.asarray(jax.device_get(tokens))[is_real]
        if len(outside := ids[(ids < 0) | (ids >= vocab)]):
            raise ValueError(f"the prompt holds {outside[0]}, which is outside the vocabulary of {vocab} tokens")


def check_mesh(mesh: Mesh | None, model: Any) -> None:
    """**Raises** `NotImplementedError` for a mesh that shards the layers, `TypeError` for another object, `ValueError`
    for a model on another mesh, `RuntimeError` for a donated one."""
    if mesh is None:
        check_not_donated(model)
        return
    require_mesh(mesh)
    for leaf, x in zip(leaves(model), jax.tree.leaves(model), strict=True):
        check_placed(leaf, x, mesh)
    if axes := mesh.axes("layers"):
        sizes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
        raise NotImplementedError(
            f"generate does not shard layers, and this mesh has {sizes}: decode on data, fsdp, context and tensor"
        )
