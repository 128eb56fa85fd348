"""Check the arguments of `generate`, and convert its sampling options to arrays."""

import math
import operator
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from zoo._checks import check_mask, check_not_donated, check_tokens, is_host_readable
from zoo.models import Decoder
from zoo.parallel import Mesh, Module, leaves
from zoo.parallel.mesh import check_placed, require_mesh

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


class SamplingOptions(Module):
    """Options of token sampling, all of them arrays: an option that is not set has its neutral value, so that neither
    setting nor changing one recompiles."""

    temperature: Float[Array, ""]
    """0 for greedy decoding."""
    top_k: Int[Array, ""]
    """At most the size of the vocabulary, which keeps every token."""
    top_p: Float[Array, ""]
    """1 keeps every token."""
    min_p: Float[Array, ""]
    """0 keeps every token."""
    penalty: Float[Array, ""]
    """1 changes nothing."""
    is_stop: Bool[Array, "classes"]
    """True for token ids that end a row."""

    presence: Float[Array, ""] | None = None
    """None, and then nothing is counted, if neither this nor `frequency` is set."""
    frequency: Float[Array, ""] | None = None
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
    def counts_tokens(self) -> bool:
        """True for options that need the counts of new tokens."""
        return self.presence is not None

    @property
    def needs_text(self) -> bool:
        """True for options that need the text so far."""
        return self.details or self.keeps_text or self.adjust is not None or self.stop_sequences is not None

    @classmethod
    def from_arguments(
        cls,
        temperature: _Number,
        top_k: int | None,
        top_p: _Number | None,
        min_p: _Number | None,
        penalty: _Number | None,
        stop_tokens: Sequence[int],
        vocab: int,
        *,
        presence: _Number | None = None,
        frequency: _Number | None = None,
        stop_sequences: Sequence[Sequence[int]] = (),
        logits: LogitsFunction | None = None,
        details: bool = False,
        keeps_text: bool = False,
        capture: Sequence[str] = (),
    ) -> "SamplingOptions":
        """Convert options of `generate` to arrays. **Raises** `ValueError` for a stop token outside the vocabulary."""
        stop = [int(token) for token in stop_tokens]
        for name, tokens in (("stop_tokens", stop), *(("stop_sequences", tokens) for tokens in stop_sequences)):
            if outside := [token for token in tokens if not 0 <= token < vocab]:
                raise ValueError(f"{name}: {outside[0]} is outside the vocabulary of {vocab} tokens")
        is_stop = np.zeros(vocab, bool)
        is_stop[stop] = True
        kept = vocab if top_k is None else min(top_k, vocab)
        if top_p is None:
            top_p = 1
        if penalty is None:
            penalty = 1
        # From NumPy: `jnp.asarray` would compile a program for each dtype and shape.
        arrays: dict[str, Any] = {
            "temperature": np.float32(temperature),
            "top_k": np.int32(kept),
            "top_p": np.float32(top_p),
            "min_p": np.float32(min_p or 0),
            "penalty": np.float32(penalty),
            "is_stop": is_stop,
        }
        if presence is not None or frequency is not None:
            arrays |= {"presence": np.float32(presence or 0), "frequency": np.float32(frequency or 0)}
        if stop_sequences:
            width = max(map(len, stop_sequences))
            padded = [[-1] * (width - len(row)) + list(row) for row in stop_sequences]
            arrays["stop_sequences"] = np.asarray(padded, np.int32)
        options = {"adjust": logits, "details": details, "keeps_text": keeps_text, "capture": tuple(capture)}
        return cls(**jax.device_put(arrays), **options)


def check_sampling_options(
    max_new_tokens: int,
    temperature: _Number,
    top_k: int | None,
    top_p: _Number | None,
    min_p: _Number | None,
    penalty: _Number | None,
    has_key: bool,
    *,
    presence: _Number | None = None,
    frequency: _Number | None = None,
    logits: LogitsFunction | None = None,
) -> None:
    """**Raises** `TypeError` for a `max_new_tokens` or `top_k` that is not an integer and for a function of logits that
    is not callable or not hashable, and `ValueError` for the first option that is out of its range, by name."""
    check_count("max_new_tokens", max_new_tokens)
    if top_k is not None:
        _check_integer("top_k", top_k)
    if not 0 <= temperature < math.inf or (temperature > 0 and not has_key):
        raise ValueError(f"temperature={temperature} needs to be 0, or above 0 with a key to sample with")
    truncation = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    if not temperature and (unused := [name for name, x in truncation.items() if x is not None]):
        raise ValueError(f"{unused[0]} needs sampling, and temperature=0 is greedy: give a temperature above 0")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k keeps at least 1 token, not {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is above 0 and at most 1, not {top_p}")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"min_p is at least 0 and at most 1, not {min_p}")
    if penalty is not None and not 0 < penalty < math.inf:
        raise ValueError(f"repetition_penalty is above 0, 1 changing nothing, not {penalty}")
    for name, x in (("presence_penalty", presence), ("frequency_penalty", frequency)):
        if x is not None and not math.isfinite(x):
            raise ValueError(f"{name} is a finite number, 0 changing nothing, not {x}")
    _check_function(logits)


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


def read_stop_tokens(stop_tokens: Sequence[int]) -> list[int]:
    """Return stop tokens as a list. **Raises** `TypeError` for anything but a sequence of integers."""
    try:
        return [operator.index(token) for token in stop_tokens]
    except TypeError:
        raise TypeError(f"stop_tokens is a sequence of token ids, such as (7,), not {stop_tokens!r}") from None


def read_stop_sequences(stop_sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return stop sequences as lists. **Raises** `TypeError` for anything but a sequence of sequences of integers, and
    `ValueError` for an empty one."""
    try:
        sequences = [[operator.index(token) for token in tokens] for tokens in stop_sequences]
    except TypeError:
        raise TypeError(
            f"stop_sequences is a sequence of sequences of token ids, such as ((13, 13),), not {stop_sequences!r}"
        ) from None
    if not all(sequences):
        raise ValueError("stop_sequences holds an empty sequence, which every text ends with")
    return sequences


def check_decoder(model: Any, name: str = "text is generated by a Decoder, not by") -> None:
    """**Raises** `TypeError` for a model that is not a decoder."""
    if not isinstance(model, Decoder):
        raise TypeError(f"{name} {type(model).__name__}")


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
